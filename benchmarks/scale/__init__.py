"""A discrete-event model of a training step on N GPUs, from fsdp2's own plans and schedule.

From below: ``machine`` says what a collective costs, ``workload`` what a model computes, ``groups`` what a compiled
plan sends, ``queues`` when operations on streams run, ``memory`` what is held, ``simulate`` what the runtime enqueues
for each action of the schedule; ``scenario`` puts them together. ``published`` and ``gloo`` compare it with measured
steps.
"""
