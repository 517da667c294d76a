"""Programs that tests of their own once spelled out, each with the fault that it notices."""

from __future__ import annotations

from tests.programs.program import Block, Micro, Precision, Program, Step

LOW = Precision("bfloat16", "float32")
PLAIN, LATER = Step(), (Micro("no reduction"), Micro("no reduction", keep=True), Micro())
# Matrices that decide how they travel, with everything else that a unit does.
WIRED = (
    Block(wire="bf16", frozen=True),
    Block("side", wire="bf16", checkpoint="reentrant"),
    Block("norms", wire="bf16", checkpoint="not reentrant", reshard=False, skipped=(2,)),
)
WIRED_STEPS = (
    Step(micros=(Micro(evaluates=True, fails=True),)),
    Step(("freeze",), LATER),
    Step(("thaw",), (Micro(uses_side=False, between=("evaluate",)), Micro(uses_side=False, fails=True))),
)
OFFLOADED = (Block("odd", frozen=True), Block("side", skipped=(1,)), Block())

REGRESSIONS: tuple[tuple[Program, str], ...] = (
    *(
        (
            Program(WIRED, precision=precision, prefetch=True, clip_norm=0.05, steps=WIRED_STEPS),
            "an old payload, or one for nobody",
        )
        for precision in (Precision(), LOW)
    ),
    (Program((*WIRED[:1], *WIRED[2:], *WIRED[2:]), listed=True, steps=WIRED_STEPS), "two modules with hooks as a unit"),
    *(
        (
            Program((Block(kind, checkpoint=how),) * 2, listed=True),
            "modules of a unit, each checkpointed, are freed early",
        )
        for kind in ("mlp", "itself")
        for how in ("reentrant", "not reentrant")
    ),
    *(
        (Program((Block("itself", reshard=reshard), Block(reshard=reshard)), steps=(step, PLAIN)), why)
        for reshard in (True, False)
        for step, why in (
            (PLAIN, "a unit that calls itself is resharded by the inner call"),
            (Step(micros=(Micro(backwards=2),)), "the second backward of a graph finds freed parameters"),
        )
    ),
    *(
        (
            Program((Block(uses=2), Block()), precision=precision, steps=(Step(micros=LATER),) * 2),
            "uses add up otherwise",
        )
        for precision in (Precision(), Precision(None, "bfloat16"))
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
        (Program(OFFLOADED, offload=True, precision=precision, optimizer=optimizer, clip_norm=norm, tied=True), why)
        for precision, optimizer, norm, why in (
            (Precision(), "AdamW foreach", 0.05, "shards on the host are clipped otherwise"),
            (Precision(), "AdamW fused", None, "shards on the host are stepped otherwise"),
            (LOW, "momentum", None, "gradients on their way to the host are cast wrongly"),
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
        for form in ("foreach", "fused", "one by one")
    ),
    (Program((Block(), Block("odd")), covered=True, optimizer="momentum"), "a root without parameters of its own"),
    (Program((Block(), Block()), steps=(PLAIN, Step(("reset",)), Step(("reset",), LATER))), "a reset drops too much"),
    (
        Program(
            (Block(), Block(reshard=False)),
            steps=(PLAIN, Step(("keep after forward",)), Step(("reshard after forward",)), PLAIN),
        ),
        "units do not follow set_reshard_after_forward between steps",
    ),
)
