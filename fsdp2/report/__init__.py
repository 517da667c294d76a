"""A report on real steps: ``with fsdp2.report.report(model, "step.html"): train_step()``.

``recorder`` records what happens when; ``timeline`` and ``memory`` read its marks; ``data`` combines all ranks;
``findings`` suggests what to change first; ``files`` writes; ``comparison`` puts two reports side by side. Only
``recorder``, ``held``, ``modules``, ``trace`` and ``call`` run next to a step; the others get plain values.
"""

from fsdp2.report import trace
from fsdp2.report.call import Report, report
from fsdp2.report.comparison import Comparison, compare_reports

__all__ = ["Comparison", "Report", "compare_reports", "report", "trace"]
