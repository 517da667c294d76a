"""The door to private torch: every use of a name that torch does not document, behind one function each.

Checked on torch 2.13.0. Each function says what it uses and why no public name would do. No other file of the package
touches a private name.
"""

from __future__ import annotations

from fsdp2._torch.autograd import (
    GradDtype as GradDtype,
    GradientHook as GradientHook,
    at_end_of_backward as at_end_of_backward,
    grads_of as grads_of,
    have_post_accumulate_grad_hooks as have_post_accumulate_grad_hooks,
    in_backward as in_backward,
    own_grad_dtype as own_grad_dtype,
    plain_access as plain_access,
    post_accumulate_grad_hooks as post_accumulate_grad_hooks,
    running_backward as running_backward,
    set_grad_dtype as set_grad_dtype,
    set_grads as set_grads,
    set_versions as set_versions,
    take_grads as take_grads,
    versions_of as versions_of,
)
from fsdp2._torch.backends import (
    all_gather as all_gather,
    allocate_by_backend as allocate_by_backend,
    allocate_symmetric as allocate_symmetric,
    backend_name as backend_name,
    exchange_addresses as exchange_addresses,
    reduce_scatter as reduce_scatter,
    timeout_of as timeout_of,
    use_symmetric_memory as use_symmetric_memory,
)
from fsdp2._torch.dtensors import (
    arrived_local as arrived_local,
    concatenated_mesh as concatenated_mesh,
    dtensor as dtensor,
    dtensor_spec as dtensor_spec,
    dtensors_like as dtensors_like,
    dtensors_placed_like as dtensors_placed_like,
    flattened_mesh as flattened_mesh,
    get_local as get_local,
    local_of as local_of,
    locals_of as locals_of,
    locals_placed_like as locals_placed_like,
    set_local as set_local,
    shards_dim as shards_dim,
    specs_of as specs_of,
    strided_shard as strided_shard,
)
from fsdp2._torch.memory import (
    foreach_add as foreach_add,
    foreach_copy as foreach_copy,
    foreach_div as foreach_div,
    foreach_mul as foreach_mul,
    foreach_norm as foreach_norm,
    pack_rows as pack_rows,
)
from fsdp2._torch.modules import (
    buffers_dict as buffers_dict,
    hooked_step as hooked_step,
    parameters_dict as parameters_dict,
    remove_hooks as remove_hooks,
    sets_attributes_plainly as sets_attributes_plainly,
    unhooked_step as unhooked_step,
    watch_calls as watch_calls,
)
from fsdp2._torch.subclasses import (
    inner_names as inner_names,
    leaves as leaves,
    rewrapped as rewrapped,
    versioned as versioned,
)
