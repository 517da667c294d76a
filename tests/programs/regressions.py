"""Programs that once failed, or that tests of their own once spelled out, each by the fault that it shows."""

from __future__ import annotations

from tests.programs.program import CHECKPOINTS, Block, Micro, Precision, Program, Step

_KEPT, _LAST = Micro("no reduction"), Micro()


def _steps(*micros: Micro, before: tuple[str, ...] = (), num: int = 2) -> tuple[Step, ...]:
    """Steps of these micro-batches; ``before``: what comes before all but the first."""
    return (Step((), micros), *(Step(before, micros) for _ in range(num - 1)))


REGRESSIONS: dict[str, Program] = {
    "mirrored refused states of the class of their parameter": Program(
        blocks=(Block(wire="scaled"),), optimizer="Muon", steps=_steps(_LAST, before=("mirror and restore",))
    ),
    "a copy of a model read shards that copies from the host were still writing": Program(
        blocks=(Block(), Block()),
        optimizer="AdamW on the host, overlapped",
        steps=_steps(_LAST, before=("copy the model",), num=3),
    ),
    "a module of a unit of several was resharded while its call of itself still computed": Program(
        blocks=(Block(), Block("itself", reshard=True)), listed=True
    ),
    "from the third micro-batch on, gradients kept in the reduce dtype were rounded twice": Program(
        precision=Precision(None, "bfloat16"), steps=_steps(_KEPT, _KEPT, _KEPT, _LAST)
    ),
    "of several forwards of a model that returns what its last unit returns, the first one's backward raised": Program(
        covered=True, steps=_steps(Micro(forwards=2))
    ),
    "through several forwards, a unit whose inputs need no gradient was reduced more than once": Program(
        covered=True, steps=_steps(Micro("no reduction", forwards=2), Micro(forwards=2))
    ),
    "a unit that runs several times was reduced after each of them": Program(
        blocks=(Block(uses=2), Block()), steps=_steps(_LAST)
    ),
    "a backward followed what was frozen around a reference forward that came before it": Program(
        steps=_steps(Micro(between=("reference",)), _LAST)
    ),
    "a backward did not follow what was frozen since its forward": Program(steps=_steps(Micro(between=("freeze",)))),
    "what was thawed while it was unsharded was never trained again": Program(
        blocks=(Block(reshard=False),),
        root_reshard=False,
        steps=(Step(("freeze",), (Micro(keep=True), _LAST)), Step(("thaw",), (Micro(between=("thaw",)), _LAST))),
    ),
    "casts that autocast keeps from an earlier micro-batch brought gradients to the next step": Program(
        autocast="step", steps=_steps(_KEPT, _LAST)
    ),
    "cleaning up after a forward that raised issued an all-reduce": Program(
        mesh="hsdp", steps=_steps(Micro("no all-reduce"), Micro(fails="forward"))
    ),
    "gradients on their way were dropped after a forward that raised": Program(
        steps=_steps(_KEPT, Micro(fails="forward"))
    ),
    "after a unit had raised, the root's forward began no pass": Program(steps=_steps(Micro(fails="block"))),
    "a backward that was repeated after one that raised lost gradients": Program(
        blocks=(Block(), Block()), steps=_steps(Micro(fails="backward"))
    ),
    "the first root kept the gradients of what another root had used on their rank": Program(
        blocks=(Block(), Block()), steps=_steps(_KEPT, _LAST, before=("another root",))
    ),
    "a model that a report watches could not be copied": Program(
        setting="report", steps=_steps(_LAST, before=("copy the model",))
    ),
    "a report that ended as a module was computed again called a hook that it had removed": Program(
        blocks=(Block(), Block(checkpoint="not reentrant"), Block()),
        listed=True,
        setting="report",
        steps=_steps(Micro(backwards=2), _LAST, num=3),
    ),
    "a rank that reshard_to brought back had forgotten that backwards are finalized by hand": Program(
        setting="finalized by hand", steps=_steps(_KEPT, _LAST, before=("to one rank and back",))
    ),
    "a save in the background lost the values of tensor subclasses": Program(
        blocks=(Block(wire="scaled"),), steps=_steps(_LAST, before=("save in the background",))
    ),
    "Muon did not step after a copy and after a freeze": Program(
        optimizer="Muon", steps=(*_steps(_LAST, before=("copy the model",)), Step(("freeze",)), Step(("thaw",)))
    ),
    "a unit that stayed unsharded was recomputed with the shards that functional_call had put back": Program(
        blocks=(Block(checkpoint="not reentrant", reshard=False), Block(checkpoint="not reentrant", alone=False)),
        steps=_steps(Micro(called="functionally")),
    ),
    "Muon stepped plain tensors and DTensors in one launch, which AdamW refuses": Program(
        optimizer="Muon", ignored=True
    ),
    "Muon took gradients of an earlier backward, which landed in the last one, for those of the last": Program(
        optimizer="Muon in backward", steps=_steps(Micro(marks_last=True), Micro(marks_last=True))
    ),
    "a report raised in a step in which another root had used a unit": Program(
        setting="report", steps=_steps(Micro(between=("another root",)), before=("another root",))
    ),
    "whole parameters were read and written while the host stepped them": Program(
        mesh="one rank",
        optimizer="AdamW on the host, overlapped",
        steps=_steps(_LAST, before=("write whole parameters", "copy the model"), num=4),
    ),
    "a root around a unit of a model that casts its inputs itself got inputs of another dtype": Program(
        precision=Precision("bfloat16", casts_inputs=False), steps=_steps(_LAST, before=("another root",))
    ),
    "parameters of a model that was unsharded by hand were wrapped": Program(
        steps=_steps(Micro(by_hand="unshard", refused="wrap shards"))
    ),
    "after a functional_call of a model that was unsharded by hand, a state dict read memory that was free": Program(
        root_reshard=True,
        steps=_steps(Micro(by_hand="unshard async", called="functionally", between=("state dict",))),
    ),
    "the host stepped with a gradient while that of an earlier micro-batch was on its way to it, and raised": Program(
        optimizer="AdamW on the host", offload=True, steps=_steps(_LAST, _LAST)
    ),
    "where ranks differ, a gradient on its way to the host overtook an earlier one, and another rank lost it": Program(
        blocks=(Block("adapters", alone=False, left_out=(0,)),),
        covered=True,
        optimizer="AdamW on the host",
        offload=True,
        steps=_steps(Micro(between=("another adapter",)), _LAST),
    ),
    **{
        f"the host stepped a unit that a backward uses again, and refused the gradient of that use: {why}": Program(
            blocks=(Block(uses=2, checkpoint=checkpoint), Block()),
            optimizer="AdamW on the host",
            steps=_steps(*micros),
        )
        for checkpoint, micros, why in (
            ("", (_KEPT, _LAST), "earlier gradients are reduced first"),
            ("reentrant", (_LAST,), "each use has a backward of its own"),
        )
    },
    **{
        f"a call that only some ranks made in a pass, and that fsdp2 refused, left others waiting: {refused}": Program(
            blocks=(Block(left_out=(0,)),),
            steps=(Step(micros=(Micro(refused=refused),)), Step(("stream", "to one rank and back"))),
        )
        for refused in ("move in forward", "stream in backward")
    },
}

_LOW = Precision("bfloat16", "float32")
_PLAIN, _LATER = Step(), (Micro("no reduction"), Micro("no reduction", keep=True), Micro())
# Matrices that decide how they travel, with everything else that a unit does.
_WIRED = (
    Block(wire="bf16", frozen=True),
    Block("side", wire="bf16", checkpoint="reentrant"),
    Block("norms", wire="bf16", checkpoint="not reentrant", reshard=False, skipped=(2,)),
)
_WIRED_STEPS = (
    Step(micros=(Micro(evaluates=True, fails="forward"),)),
    Step(("freeze",), _LATER),
    Step(("thaw",), (Micro(uses_side=False, between=("evaluate",)), Micro(uses_side=False, fails="forward"))),
)
_OFFLOADED = (Block("odd", frozen=True), Block("side", skipped=(1,)), Block())

_INSTEAD_OF_TESTS: tuple[tuple[Program, str], ...] = (
    *(
        (
            Program(_WIRED, precision=precision, prefetch=True, clip_norm=0.05, steps=_WIRED_STEPS),
            "an old payload, or one for nobody",
        )
        for precision in (Precision(), _LOW)
    ),
    (
        Program((*_WIRED[:1], *_WIRED[2:], *_WIRED[2:]), listed=True, steps=_WIRED_STEPS),
        "two modules with hooks as a unit",
    ),
    *(
        (
            Program((Block(kind, checkpoint=how),) * 2, listed=True),
            "modules of a unit, each checkpointed, are freed early",
        )
        for kind in ("mlp", "itself")
        for how in ("reentrant", "not reentrant")
    ),
    *(
        (Program((Block("itself", reshard=reshard), Block(reshard=reshard)), steps=(step, _PLAIN)), why)
        for reshard in (True, False)
        for step, why in (
            (_PLAIN, "a unit that calls itself is resharded by the inner call"),
            (Step(micros=(Micro(backwards=2),)), "the second backward of a graph finds freed parameters"),
        )
    ),
    *(
        (
            Program((Block(uses=2), Block()), precision=precision, steps=(Step(micros=_LATER),) * 2),
            "uses add up otherwise",
        )
        for precision in (Precision(), Precision(None, "bfloat16"), Precision("bfloat16"), _LOW)
    ),
    *(
        (
            Program(
                (Block(uses=uses), Block(), Block()),
                mesh=mesh,
                setting="two reductions",
                steps=_steps(Micro("no all-reduce"), _LAST),
            ),
            "partial sums of reductions that are in flight together are mixed up",
        )
        for mesh, uses in (("hsdp", 2), ("one replica", 1))
    ),
    (
        Program((Block(left_out=(0,)), Block(left_out=(1,))), setting="two reductions", steps=_steps(_KEPT, _LAST)),
        "ranks that differ reduce units in the order of each rank's own backward",
    ),
    *(
        (
            Program((Block(checkpoint=how, reshard=True), Block(alone=False, checkpoint=how)), root_reshard=True),
            "what is computed again, as a unit or inside of one, meets shards",
        )
        for how in CHECKPOINTS
    ),
    (
        Program(
            (Block(reshard=False),),
            root_reshard=False,
            steps=_steps(Micro(apart=True, between=("forward in vain",))),
        ),
        "backwards in another order than the forwards, of which one has none, find freed parameters",
    ),
    *(
        (
            Program(
                (Block(), Block(reshard=False)), steps=(Step(micros=(Micro(by_hand=by_hand, evaluates=True),)),) * 2
            ),
            why,
        )
        for by_hand, why in (
            ("unshard", "parameters that were unsharded by hand are gathered again, or are old"),
            ("unshard async", "a handle leaves parameters that were not waited for"),
            ("reshard", "what was resharded by hand counts as unsharded"),
        )
    ),
    *(
        (Program(_OFFLOADED, offload=True, precision=precision, optimizer=optimizer, clip_norm=norm, tied=True), why)
        for precision, optimizer, norm, why in (
            (Precision(), "AdamW foreach", 0.05, "shards on the host are clipped otherwise"),
            (Precision(), "AdamW fused", None, "shards on the host are stepped otherwise"),
            (_LOW, "momentum", None, "gradients on their way to the host are cast wrongly"),
            (Precision("bfloat16"), "SGD", None, "gradients on their way to the host are cast wrongly"),
        )
    ),
    *(
        (
            Program(
                (Block("odd", alone=False), Block("odd", alone=False)), optimizer="momentum", set_to_none=no, dim=10
            ),
            why,
        )
        for no, why in ((True, "a root alone"), (False, "gradients that were zeroed in place are lost"))
    ),
    *(
        (Program((Block("odd"), Block()), mesh="hsdp", optimizer=f"AdamW {form}", set_to_none=False), "zeroed in place")
        for form in ("foreach", "fused", "one by one", "flat")
    ),
    (Program((Block(), Block("odd")), covered=True, optimizer="momentum"), "a root without parameters of its own"),
    (Program((Block(), Block()), steps=(_PLAIN, Step(("reset",)), Step(("reset",), _LATER))), "a reset drops too much"),
    (
        Program(
            (Block(), Block(reshard=False)),
            steps=(_PLAIN, Step(("keep after forward",)), Step(("reshard after forward",)), _PLAIN),
        ),
        "units do not follow set_reshard_after_forward between steps",
    ),
    (
        Program((Block(), Block()), setting="joined", steps=(Step(micros=_LATER),) * 2),
        "gradients are scaled though no rank lacks a batch",
    ),
)
REGRESSIONS |= {f"{fault} ({index})": program for index, (program, fault) in enumerate(_INSTEAD_OF_TESTS)}
