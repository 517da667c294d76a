"""The policies of ``torch.distributed.fsdp.wrap``: torch's own, since they know nothing of the wrapper."""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    _Policy,
    _recursive_wrap,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_Policy",
    "_module_wrap_policy",
    "_or_policy",
    "_recursive_wrap",
    "_wrap_module_cls_individually",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
