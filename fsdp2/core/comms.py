"""*How* bytes are sent, for rooms that send their own, and users who implement a comm: collectives, streams, memory."""

from fsdp2.core.comm.backends import (
    AxisComm,
    CollectiveComm,
    Launch,
    LocalComm,
    ReduceComm,
    ReduceLaunch,
    all_reduce,
    comm_for,
    copies,
    register_comm,
)
from fsdp2.core.comm.custom import AllGather, AllReduceHook, Comm, GathersBy, ReducesBy, ReduceScatter
from fsdp2.core.comm.memory import alias, tensor_on
from fsdp2.core.comm.offload import Home, home_for
from fsdp2.core.comm.streams import (
    Activity,
    Streams,
    Waitable,
    launched,
    lost,
    observe_activities,
    observed,
    streams_for,
    wait_for,
    waiting,
)
from fsdp2.core.group.all_gather import allocate
from fsdp2.core.group.gradients import Landed

__all__ = ["AllGather", "Comm", "ReduceScatter"]  # for users; rooms use all that is imported
