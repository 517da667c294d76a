"""Functions of clients that read or set private names of torch, each from the client's own file: see ``sources``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.clients.compare import client, parameters_of, shard_each
from tests.clients.sources import functions_of, needs_sources

pytestmark = needs_sources
on_two_ranks = client(preload=("torch.distributed.fsdp", "torch._dynamo"))


class Device:
    """Stands for the modules by which clients find the accelerator: here, the CPU."""

    @staticmethod
    def empty_cache() -> None: ...


ON_CPU: dict[str, Any] = {
    "get_torch_device": lambda: Device,
    "get_device_id": lambda: 0,
    "get_device_name": lambda: "cpu",
    "get_device_type": lambda: "cpu",
    "empty_cache": lambda: None,
}


def sharded(**options: Any) -> Any:
    """A model of two units and a root that has a parameter of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 6))
    shard_each(model[0], model[1], model, **options)
    return model


def batch(rank: int, seed: int = 0) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * seed + rank))


def trained(model: nn.Module, rank: int) -> list[Tensor]:
    """The losses of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        losses.append(model(batch(rank, step)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # one rank has the store
    return [loss.detach() for loss in losses]


@on_two_ranks
def test_verl_sets_what_happens_after_forward(rank: int, folder: Path) -> Any:
    (set_reshard,) = functions_of("verl/utils/fsdp_utils.py", "set_reshard_after_forward").values()
    model, found = sharded(), []
    for reshards in (False, True):
        set_reshard(model, reshards)
        with torch.no_grad():
            model(batch(rank))
        found.append([type(param).__name__ for param in model.parameters()])
        model.reshard()
        model[0].reshard()
        model[1].reshard()
    return [found, trained(model, rank)]


@pytest.mark.parametrize(
    ("path", "offload", "load"),
    [
        ("verl/workers/engine/automodel/utils.py", "offload_automodel_model_to_cpu", "load_automodel_model_to_gpu"),
        ("verl/workers/engine/veomni/utils.py", "offload_veomni_model_to_cpu", "load_veomni_model_to_gpu"),
        ("veomni/distributed/offloading.py", "offload_model_to_cpu", "load_model_to_gpu"),
    ],
    ids=["verl's automodel", "verl's veomni", "veomni"],
)
@on_two_ranks
def test_models_are_moved_between_two_phases(rank: int, folder: Path, path: str, offload: str, load: str) -> Any:
    more = ["_reset_training_state"] if path.startswith("veomni") else []
    functions = functions_of(path, offload, load, *more, **{**ON_CPU, "get_device_id": lambda: "cpu"})
    model = sharded(reshard_after_forward=False)
    with torch.no_grad():
        model(batch(rank))  # stays unsharded
    functions[offload](model)
    found = [type(param).__name__ for param in model.parameters()]
    functions[load](model)
    return [found, trained(model, rank)]


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_two_ranks
def test_verl_moves_models_of_fsdp1_between_two_phases(rank: int, folder: Path, use_orig_params: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = ("fsdp_version", "offload_fsdp_model_to_cpu", "load_fsdp_model_to_gpu")
    functions = functions_of("verl/utils/fsdp_utils.py", *names, **ON_CPU)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        inner = FullyShardedDataParallel(nn.Linear(4, 6), **options)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 4), inner), **options)
    found = trained(model, rank)
    functions["offload_fsdp_model_to_cpu"](model)
    assert len(model._all_handles) == 2
    functions["load_fsdp_model_to_gpu"](model)
    with torch.no_grad():
        model(batch(rank))
    model._handle.reshard(True)  # as verl does behind a generation
    if model._handle:
        found += trained(model, rank)
    return found


MIXIN = "nemo_automodel/components/moe/fsdp_mixin.py"
STAGE = "olmo_core/train/train_module/transformer/pipeline/pipeline_stage.py"


@pytest.mark.parametrize("of", ["automodel", "automodel's stage", "olmo_core"])
@on_two_ranks
def test_pipelines_reduce_behind_the_last_micro_batch(rank: int, folder: Path, of: str) -> Any:
    if of == "automodel":
        functions = functions_of(MIXIN, "_configure_fsdp_module", "_run_post_backward_hooks")
    else:
        functions = functions_of(MIXIN if "stage" in of else STAGE, "run_post_backward")
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded(reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for seed in range(3):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        model(batch(rank, seed)).square().mean().backward()
    if of == "automodel":
        ends = {"is_last_backward": True, "reshard_after_backward": True, "requires_gradient_sync": True}
        functions["_configure_fsdp_module"](model, **ends)
        functions["_run_post_backward_hooks"](model)()
    else:
        functions["run_post_backward"](model)
    return [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("of", ["deepseek_v4", "diffusion_gemma"])
@on_two_ranks
def test_automodel_knows_what_is_sharded(rank: int, folder: Path, of: str) -> Any:
    (has_state,) = functions_of(f"nemo_automodel/components/models/{of}/fsdp.py", "_has_fsdp_state").values()
    return [has_state(module) for module in sharded().modules()]


@on_two_ranks
def test_axolotl_defers_resharding_of_a_tiled_layer(rank: int, folder: Path) -> Any:
    names = ("_find_fsdp2_module", "_defer_fsdp2_reshard")
    functions = functions_of("axolotl/monkeypatch/tiled_mlp/base.py", *names)
    model = sharded()
    layer, found = model[1][0], []
    assert functions["_find_fsdp2_module"](layer) is model[1]
    output = model(batch(rank))
    with functions["_defer_fsdp2_reshard"](layer):
        output.square().mean().backward()
        found.append(type(layer.weight).__name__)
    found.append(type(layer.weight).__name__)
    model.zero_grad()
    return [found, trained(model, rank)]


@on_two_ranks
def test_modelopt_reads_weights_and_meshes(rank: int, folder: Path) -> Any:
    names = ("_get_fsdp2_mesh", "_get_module_name", "_get_enclosing_fsdp_module", "_fsdp2_unshard_context")
    more = ("_disable_fsdp_unshard_reshard", "build_param_index", "get_prefixed_param_names")
    path = "modelopt/torch/quantization/utils/core_utils.py"
    functions = functions_of(path, *names, *more, "create_fsdp_param_mapping")
    model = sharded()
    model(batch(rank))
    model.reshard()
    unit = functions["_get_enclosing_fsdp_module"](model[1][0], model)
    assert unit is model[1]
    with functions["_fsdp2_unshard_context"](unit):
        whole = model[1][0].weight.detach().clone()
    group = unit._get_fsdp_state()._fsdp_param_group
    mapping = functions["create_fsdp_param_mapping"](group.fsdp_params, model)
    mesh = functions["_get_fsdp2_mesh"](model)
    return [whole, type(model[1][0].weight).__name__, sorted(mapping), mesh.shape, trained(model, rank)]


@on_two_ranks
def test_transformer_engine_finds_the_unit_around_a_layer(rank: int, folder: Path) -> Any:
    (state_of,) = functions_of("transformer_engine/pytorch/distributed.py", "_get_module_fsdp_state").values()
    model, found = sharded(), []
    inner = state_of(model[1][0])
    assert inner is model[1]._get_fsdp_state() is state_of(model[1])

    def note(*_: object) -> None:
        """What its tensors ask for before a gather: which of their two forms to send."""
        group = inner._fsdp_param_group
        found.append([group._reshard_after_forward, group._training_state.name])

    model[1].register_forward_pre_hook(note)
    model[1][0].register_forward_hook(lambda _, args, output: output.register_hook(note) and None)
    model(batch(rank)).square().mean().backward()
    with pytest.raises(RuntimeError, match="not FSDP-wrapped"):
        state_of(nn.Linear(1, 1))
    dist.barrier()  # one rank has the store
    return found


@on_two_ranks
def test_transformer_engine_gives_layers_their_group(rank: int, folder: Path) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Layer(nn.Linear):
        """Stands for a layer of the client, which needs CUDA."""

        def fast_setattr(self, name: str, value: Any) -> None:
            self.__dict__[name] = value

    known = {"FSDP": FullyShardedDataParallel, "_is_te_module": lambda module: isinstance(module, Layer)}
    path, name = "transformer_engine/pytorch/distributed.py", "prepare_te_modules_for_fsdp"
    (prepare,) = functions_of(path, name, **known).values()
    dist.init_process_group("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        options: dict[str, Any] = {"device_id": torch.device("cpu")}
        inner = FullyShardedDataParallel(Layer(4, 4), **options)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), inner), **options)
    prepare(model)
    return [inner.module.fsdp_group is inner.process_group, inner.module.fsdp_group.size()]


@on_two_ranks
def test_fairseq2_runs_a_whole_model_without_hooks(rank: int, folder: Path) -> Any:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    (apply,) = functions_of("fairseq2/nn/utils/module.py", "apply_to_parameters").values()
    known = {"apply_to_parameters": apply, "OperationalError": RuntimeError, "FSDP2Module": FSDPModule}
    (summoned,) = functions_of("fairseq2/nn/fsdp/fsdp2.py", "fsdp2_summon_full_parameters", **known).values()
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    found: list[Any] = []
    with torch.no_grad(), summoned(model):
        for _ in range(2):
            found.append(model(batch(rank).bfloat16()))
            found.append([type(param).__name__ for param in model.parameters()])
    found += [[type(param).__name__ for param in model.parameters()], trained(model, rank)]
    return [found, parameters_of(model)]
