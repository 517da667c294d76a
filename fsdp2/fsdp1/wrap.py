"""The policies of ``torch.distributed.fsdp.wrap``. They are torch's own, since they do not depend on the wrapper."""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import __all__ as __all__

from fsdp2.fsdp1.torch_names import PRIVATE_POLICIES

globals().update(PRIVATE_POLICIES)
