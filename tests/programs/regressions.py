"""Programs that once failed, each by the fault that it showed."""

from __future__ import annotations

from tests.programs.program import Block, Micro, Precision, Program, Step

_KEPT, _LAST = Micro("no reduction"), Micro()


def _steps(*micros: Micro, before: tuple[str, ...] = (), num: int = 2) -> tuple[Step, ...]:
    """Steps of these micro-batches; ``before``: what comes before all but the first."""
    return (Step((), micros), *(Step(before, micros) for _ in range(num - 1)))


REGRESSIONS: dict[str, Program] = {
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
    "Muon did not step after a copy and after a freeze": Program(
        optimizer="Muon", steps=(*_steps(_LAST, before=("copy the model",)), Step(("freeze",)), Step(("thaw",)))
    ),
}
