"""Training with the class, in any precision, and what trainers do besides a plain step: as with torch's class."""

from __future__ import annotations

import copy
import importlib
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fsdp2.core import _torch
from tests.harness.models import DIM, Branches
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, mlp, quiet, with_ours, wrapped_mlp
from tests.parity.fsdp1.kinds import FULL_SHARD, GRAD_OP, NO_SHARD


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@as_torchs(2, both_modes=True)
def test_models_of_many_kinds(front: Front) -> dict[str, Any]:
    by_turns = {"lr": 0.1, "shape": (3, DIM), "choices": [(0, 1, 2), (0, 2), (1,), (0, 1, 2), (0, 1, 2)]}
    in_units, kept = Branches(), {"sharding_strategy": GRAD_OP}
    for index in (0, 1):
        in_units.blocks[index] = front.wrap(in_units.blocks[index])
    inside = front.wrap(checkpoint_wrapper(nn.Linear(8, 8)), **kept)
    around = Checkpointed(front.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), **kept))
    assert type(inside.module) is nn.Linear
    converted = wrapped_mlp(front).to(torch.float64)
    assert {param.dtype for param in converted.parameters()} == {torch.float64}
    return {
        "unused parameters of a unit": front.train(front.wrap(Branches()), **by_turns),
        "unused units": front.train(front.wrap(in_units), **by_turns),
        "modules around wrappers": front.train(nn.Sequential(*(front.wrap(nn.Linear(8, 8)) for _ in range(2)))),
        "activation checkpointing": front.train(front.wrap(nn.Sequential(inside, around, nn.Linear(8, 4)), **kept)),
        "another dtype": front.train(converted, lr=0.1, num_steps=2, dtype=torch.float64),
    }


def after_no_sync(front: Front, zero_grad: str) -> torch.Tensor:
    """An output after a step whose first gradients, of ``no_sync``, ``zero_grad`` of the model or optimizer drops."""
    torch.manual_seed(0)
    model = wrapped_mlp(front)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(front.batch(3, 8)).square().mean().backward()
    if zero_grad:
        {"model": model, "optimizer": optimizer}[zero_grad].zero_grad()
    model(front.batch(3, 8, seed=1)).square().mean().backward()
    optimizer.step()
    return model(front.batch(3, 8, seed=2)).detach()


@as_torchs(2, both_modes=True)
def test_zero_grad_of_the_model_drops_what_no_sync_has_left(front: Front) -> Any:
    """The optimizer's finds it with torch's class only, as ``docs/migrating.md`` says."""
    finds_it = "" if front.is_ours else "model"
    found = [after_no_sync(front, who) for who in ("model", "optimizer", finds_it)]
    assert torch.equal(found[1], found[2])
    return found[0]


@as_torchs(2, both_modes=True)
def test_parameters_have_torchs_names(front: Front) -> Any:
    """Clients join names of modules, and look for the result among those of parameters. Flat ones have torch's mark."""
    model = wrapped_mlp(front)
    with front.cls.summon_full_params(model):
        inside = [name for name, _ in model.named_parameters()]
    (group,) = torch.optim.SGD(model.parameters()).param_groups
    marks = [front.use_orig_params or param._fsdp_flattened for param in group["params"]]
    return [name for name, _ in model.named_parameters()], inside, marks


def names_to_decay(module: nn.Module) -> list[str]:
    """As transformers' ``Trainer`` finds them: it walks modules, leaves out norms and biases, and then looks for the
    names among those of ``named_parameters``."""
    children = [(name, child) for name, child in module.named_children() if not isinstance(child, nn.LayerNorm)]
    inside = [f"{name}.{each}" for name, child in children for each in names_to_decay(child)]
    return [name for name in [*inside, *module._parameters] if "bias" not in name]


@pytest.mark.every_case
@pytest.mark.parametrize("checkpoints", ["none", "inside", "around", "later"])
@as_torchs(2, both_modes=True)
def test_clients_that_walk_modules_find_what_to_decay(front: Front, checkpoints: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 7)), nn.Linear(7, 4))
    model[1], model[3] = front.wrap(model[1]), front.wrap(model[3].requires_grad_(False))
    model[0] = front.wrap(checkpoint_wrapper(model[0]) if checkpoints == "inside" else model[0])
    model[0] = checkpoint_wrapper(model[0]) if checkpoints == "around" else model[0]
    model = front.wrap(model)
    if checkpoints == "later":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    params, decayed = dict(model.named_parameters()), names_to_decay(model)
    groups = [[name for name in params if (name in decayed) == decays] for decays in (True, False)]
    given = [
        {"params": [params[name] for name in names], "weight_decay": decay}
        for names, decay in zip(groups, (0.5, 0.0), strict=True)
    ]
    found = [*groups, [param.requires_grad for param in params.values()], type(model[3].module)]
    return [*found, *front.train(model, torch.optim.AdamW(given, 1e-2))]


@with_ours(2)
def test_data_and_gradient_of_a_flat_parameter_lie_as_the_user_gives_them(front: Front) -> None:
    """The gradient where those of the shards do, the data in a part of another tensor."""
    flat = front.wrap(nn.Linear(8, 8))._flat_param
    memory = torch.arange(100.0 + flat.numel())[100:]  # late in its storage
    places = [(param.sharded, part.data_ptr() - memory.data_ptr(), part.shape) for param, part in flat.parts(memory)]
    parts = [memory[start // 4 : start // 4 + shape.numel()].view(shape) for _, start, shape in places]
    _torch.set_grads([param for param, _, _ in places], parts)
    assert torch.equal(flat.grad, memory)
    assert flat.grad.data_ptr() == memory.data_ptr()
    values = torch.arange(100.0 + 2 * flat.numel())[100::2]
    flat.data = values
    assert torch.equal(flat.detach(), values)


@with_ours(2)
def test_hooks_that_a_flat_parameter_would_never_call_are_refused(front: Front) -> None:
    model = front.wrap(nn.Sequential(nn.Linear(8, 8), front.wrap(nn.Linear(8, 4))))
    front.train(model, num_steps=1)
    for index, flat in enumerate(model.parameters()):
        for register in (flat.register_hook, flat.register_post_accumulate_grad_hook):
            with pytest.raises(NotImplementedError, match=f"'{index}.weight', '{index}.bias'.* use_orig_params=True"):
                register(lambda _: None)


@pytest.mark.parametrize("order", [1, -1])
@with_ours(2, both_modes=True)
def test_an_optimizer_copied_with_the_model_steps_the_copy(front: Front, order: int) -> None:
    """Torch's class cannot be copied in flat mode: ours must train as the original does, and alone."""
    model = wrapped_mlp(front)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    front.train(model, optimizer, num_steps=1)
    copied, its_optimizer = copy.deepcopy((model, optimizer)[::order])[::order]
    assert set(its_optimizer.param_groups[0]["params"]) == set(copied.parameters())
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert front.train(copied, its_optimizer) == front.train(model, optimizer)


@pytest.mark.parametrize("strategy", [FULL_SHARD, GRAD_OP, NO_SHARD])
@as_torchs(2, both_modes=True)
def test_parameters_are_shards_after_an_evaluation(front: Front, strategy) -> Any:
    """Also for modules around the wrapper or inside it. With torch's class, a step after it would go wrong."""
    model = wrapped_mlp(front, sharding_strategy=strategy)
    for i, param in enumerate(model.parameters()):
        param.tag = i

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(front.batch(3, 8))

    evaluate()
    tags = [param.tag for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(front.batch(3, 8, seed=1)).square().mean().backward()
    evaluate()
    nn.ModuleList([model]).zero_grad()
    front.train(model, optimizer, num_steps=range(2, 3))
    return [tags, evaluate()]


@as_torchs(2)
def test_attributes_of_the_wrapped_module_are_the_wrappers_too(front: Front) -> Any:
    model = wrapped_mlp(front)
    model.module.note = "here"
    inner = front.cls.fsdp_modules(model)
    model(front.batch(3, 8))
    roots = front.cls.fsdp_modules(model, root_only=True)
    found = [model.note, model[1] is model.module[1], len(inner), inner[0] is model, roots == [model]]
    found += [model.check_is_root(), model[0].check_is_root(), hasattr(model, "no such attribute")]
    return [*found, model.rank, model.world_size, model.sharding_strategy.name]


@as_torchs(2, both_modes=True)
def test_hooks_on_a_wrapped_module_see_whole_parameters(front: Front) -> Any:
    """Those that ``docs/migrating.md`` names may see shards with ours."""
    seen: list[bool] = []

    def register(kind: str, **options: bool) -> None:
        getattr(inner, f"register_{kind}")(lambda module, *_: note(module.weight), **options)

    def note(weight: torch.Tensor) -> None:
        seen.append(type(weight) in (torch.Tensor, nn.Parameter) and weight.shape == (8, 8))

    inner = nn.Linear(8, 8)
    register("forward_pre_hook", prepend=True)
    register("forward_hook")
    model = front.wrap(nn.Sequential(nn.Linear(8, 8), front.wrap(inner)))
    register("forward_pre_hook")
    register("forward_hook", prepend=True)
    register("full_backward_hook")
    if not front.is_ours:
        register("forward_pre_hook", prepend=True)
        register("forward_hook")
        register("full_backward_pre_hook")
    model(front.batch(3, 8)).sum().backward()
    assert all(seen)
    return len(seen) - 3 * (not front.is_ours)


@with_ours(2, both_modes=True)
def test_a_step_after_an_exception(front: Front) -> None:
    """Torch's class needs a reset by hand; ours starts the next step as if nothing had happened."""
    model = wrapped_mlp(front)
    expected = front.train(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, 5))
    assert front.train(model, optimizer) == expected


@pytest.mark.ci
@pytest.mark.parametrize("where", ["model", *long("blocks")])
@as_torchs(2)
def test_compiled(front: Front, where: str) -> Any:
    torch._dynamo.reset()
    model = wrapped_mlp(front, use_orig_params=True)
    for i in (0, 2) if where == "blocks" else ():
        model.module[i] = torch.compile(model.module[i], backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # the compiler looks at it
        return front.train(torch.compile(model, backend="aot_eager") if where == "model" else model)


@as_torchs(2, both_modes=True)
def test_clients_upcast_flat_parameters(front: Front) -> Any:
    """As accelerate does for a model in low precision, before the first forward."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
    model = front.wrap(inner, mixed_precision=MixedPrecision(torch.bfloat16))
    (module,) = front.cls.fsdp_modules(model)
    assert module._has_params
    param = module._flat_param
    param.data = param.data.to(torch.float32)
    module._handle._orig_param_dtype = torch.float32
    return [*front.train(model, lr=0.1), {str(each.dtype) for each in model.parameters()}, len(param._fqns)]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Layer(nn.Linear):
    """Notes the dtype that it computes in."""

    seen: list[torch.dtype]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.weight.dtype]
        return super().forward(x)


class Norm(nn.Module):
    """Stands for a batch normalisation, which the CPU has no mixed dtypes of."""

    seen: list[torch.dtype]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.weight.dtype, self.mean.dtype]
        return (x - self.mean.to(x.dtype)) * self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.exit = Layer(8, 8), Norm(), Layer(8, 4)
        self.register_buffer("scale", torch.full((8,), 1.1))
        self.entry.seen = self.norm.seen = self.exit.seen = self.seen = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        self.seen += [x.dtype, self.scale.dtype]
        return self.exit(self.norm(x * self.scale.to(x.dtype)))


mixed = partial(MixedPrecision, _module_classes_to_ignore=(Norm,))
PRECISIONS = {
    "bf16": mixed(BF16),
    "bf16, reduced in fp32": mixed(BF16, FP32),
    "bf16, buffers too": mixed(BF16, BF16, BF16),
    "reduced in bf16": mixed(reduce_dtype=BF16),
    "low gradients": mixed(BF16, BF16, keep_low_precision_grads=True),
    "all inputs cast": mixed(BF16, cast_forward_inputs=True),
    "no inputs cast": mixed(BF16, cast_root_forward_inputs=False),
    "no classes in fp32": MixedPrecision(BF16, _module_classes_to_ignore=()),
    "fp16": mixed(FP16, FP16, FP16),
}


BY_POLICY = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


def used(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.grad is not None and param.numel()]


@pytest.mark.parametrize("has_policy", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("name", PRECISIONS)
@as_torchs(2)
def test_dtypes_and_losses_are_torchs(front: Front, name: str, use_orig_params: bool, has_policy: bool) -> Any:
    precision, inner = PRECISIONS[name], Model()
    options = BY_POLICY if has_policy else {}
    model = quiet(front.wrap, inner, mixed_precision=precision, use_orig_params=use_orig_params, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        x = front.batch(4, 8, seed=step).to(FP32 if precision.cast_root_forward_inputs else BF16)
        loss = model(x).float().square().mean()
        loss.backward()
        seen += [loss.detach(), sorted({str(param.grad.dtype) for param in used(model)})]
        if not precision.keep_low_precision_grads:
            optimizer.step()
        optimizer.zero_grad()
    saved = {name: str(value.dtype) for name, value in model.state_dict().items()}
    if has_policy:  # of a wrapper without parameters, torch's class saves buffers as they were cast
        saved = {name: dtype for name, dtype in saved.items() if front.is_ours and dtype != str(FP32)}
    return [*seen, [str(dtype) for dtype in inner.seen], saved]


@pytest.mark.parametrize("reduce_dtype", [BF16, None, FP32])
@pytest.mark.parametrize("param_dtype", [BF16, None])
@as_torchs(2, both_modes=True)
def test_low_gradients_can_be_cast_up(front: Front, param_dtype, reduce_dtype) -> Any:
    precision = MixedPrecision(param_dtype, reduce_dtype, keep_low_precision_grads=True)
    model = wrapped_mlp(front, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, dtypes = [], []
    for step in range(6):
        loss = model(front.batch(4, 8, seed=step)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if step % 2:  # the other gradients add up
            dtypes.append({str(param.grad.dtype) for param in used(model)})
            for param in used(model):
                param.grad = param.grad.float()
            optimizer.step()
            optimizer.zero_grad()
    if reduce_dtype is FP32:  # torch's class rounds the reduced gradients; ours are as they were reduced
        return [loss.bfloat16() for loss in losses]
    return [losses, dtypes]


@as_torchs(2)
def test_casts_of_the_roots_inputs_and_classes_in_full_precision(front: Front) -> Any:
    """Inputs of a root with parameters are cast if those of all wrappers are. Classes are named once."""
    precision = MixedPrecision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False)
    seen: list[torch.dtype] = []
    for options in ({}, BY_POLICY):
        inner = nn.Sequential(nn.Linear(8, 4))
        inner.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        front.wrap(inner, mixed_precision=precision, **options)(front.batch(4, 8)).sum().backward()
    with pytest.warns(UserWarning, match="Norm") as found:
        front.wrap(Model(), mixed_precision=mixed(BF16), **BY_POLICY)
    return [*seen, len([each for each in found if "precision" in str(each.message)])]


def step_in_backward(model: Any, *, register_hook: bool = True) -> None:
    optim = quiet(importlib.import_module, "torch.distributed.optim")
    optim._apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.1}, register_hook=register_hook)


@pytest.mark.parametrize("when", ["after wrapping", *long("before")])
@as_torchs(2)
def test_optimizers_step_original_parameters_in_backward(front: Front, when: str) -> Any:
    made = mlp()
    if when == "before":
        step_in_backward(made, register_hook=False)
    model = front.wrap(made, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    if when == "after wrapping":
        step_in_backward(model, register_hook=False)
    losses = front.train(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))  # which steps nothing of the model
    return [losses, dict(model.state_dict())]


@as_torchs(2)
def test_no_optimizer_steps_a_flat_parameter_in_backward(front: Front) -> None:
    """As torch's class, ours refuses in the first forward; after that, at the call."""
    model = wrapped_mlp(front)
    step_in_backward(model, register_hook=False)
    with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
        front.train(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    if front.is_ours:
        model = wrapped_mlp(front)
        front.train(model, num_steps=1)
        with pytest.raises(RuntimeError, match=r"the flat parameter of '4.weight', '4.bias', which takes no part"):
            step_in_backward(model)
        assert len(front.train(model)) == 3


@pytest.mark.parametrize("options", [{"buffer_dtype": BF16}, *long({}, {"reduce_dtype": FP32})], ids=str)
@as_torchs(2, both_modes=True)
def test_full_precision_in_evaluation_on_request(front: Front, options: dict[str, Any]) -> Any:
    precision = MixedPrecision(param_dtype=BF16, **options)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        inner = Model()
        inner.entry = front.wrap(inner.entry, mixed_precision=precision)
        model = front.wrap(inner, mixed_precision=precision)
    found = []
    for is_training in (True, False, True):
        model.train(is_training)
        found += front.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            found.append(model(front.batch(3, 8, seed=9)).float())
        found += [model.scale.dtype, {name: value.dtype for name, value in model.state_dict().items()}]
    return [*found, inner.seen]
