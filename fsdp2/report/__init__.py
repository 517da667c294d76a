"""A report on real steps: ``with fsdp2.report.report(model, "step.html"): train_step()``.

``recorder`` records what happens when; ``timeline`` reads its marks; ``data`` combines all ranks; ``findings`` suggests
what to change first; ``files`` writes; ``comparison`` puts two reports side by side. Only ``recorder`` and ``call``
depend on torch.
"""

from fsdp2.report import trace
from fsdp2.report.call import Report, report
from fsdp2.report.comparison import Comparison, compare_reports

__all__ = ["Comparison", "Report", "compare_reports", "report", "trace"]
