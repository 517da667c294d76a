"""*When* actions run, for rooms that plan, limit or change them: the schedule, its actions, and states of groups."""

from fsdp2.core.schedule.schedule import Action, Actions, Phase, Schedule, UnitRules, in_parts
from fsdp2.core.schedule.states import TRANSITIONS, GroupEvent, Outcome
