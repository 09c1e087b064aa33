"""Qwen3-4B with z-lab/Qwen3-4B-DFlash-b16, the paper's first pair: candidates 14 to 18 (B0 = 16, k = 2).

The paper's averages at T=0: DFlash(16) 3.99x, tau 6.31; its policy 4.17x, tau 6.59 (read out of the label runs).
"""

from blockpilot.sweep.sweep import candidates_around
from jobs.common.config import main
from workflows import paper
from workflows.pipeline import Pipeline

CANDIDATES = candidates_around(16)


def pipeline(config: paper.PaperConfig) -> Pipeline:
    return paper.pipeline(config, "qwen3-4b", CANDIDATES)


def run(config: paper.PaperConfig) -> None:
    paper.run(config, pipeline(config))


if __name__ == "__main__":
    main(paper.PaperConfig, run)
