"""Llama-3.1-8B-Instruct with z-lab's UltraChat draft: candidates 8 to 12 (B0 = 10, k = 2).

The paper's averages at T=0: DFlash 3.03x, tau 4.48; its policy 3.25x, tau 4.82 (read out of the label runs). The
target is gated on the hub: `hf auth login` first.
"""

from blockpilot.sweep.sweep import candidates_around
from jobs.common.config import main
from workflows import paper
from workflows.pipeline import Pipeline

CANDIDATES = candidates_around(10)


def pipeline(config: paper.PaperConfig) -> Pipeline:
    return paper.pipeline(config, "llama31-8b", CANDIDATES)


def run(config: paper.PaperConfig) -> None:
    paper.run(config, pipeline(config))


if __name__ == "__main__":
    main(paper.PaperConfig, run)
