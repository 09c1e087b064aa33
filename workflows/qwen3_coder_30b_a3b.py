"""Qwen3-Coder-30B-A3B with z-lab/Qwen3-Coder-30B-A3B-DFlash: candidates 14 to 18 (B0 = 16, k = 2), and 1.

A mixture of experts pays for every drafted token with more experts read, so plain decoding is a candidate, too.
The paper's averages at T=0: DFlash(16) 3.86x, tau 5.68; its policy 4.12x, tau 6.05 (read out of the label runs).
"""

from blockpilot.sweep.sweep import candidates_around
from jobs.common.config import main
from workflows import paper
from workflows.pipeline import Pipeline

CANDIDATES = (1, *candidates_around(16))


def pipeline(config: paper.PaperConfig) -> Pipeline:
    return paper.pipeline(config, "qwen3-coder-30b-a3b", CANDIDATES)


def run(config: paper.PaperConfig) -> None:
    paper.run(config, pipeline(config))


if __name__ == "__main__":
    main(paper.PaperConfig, run)
