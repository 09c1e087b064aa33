"""Cache of step costs on this machine, for servers and sweeps: measuring takes seconds, checking less than one."""

import hashlib
import logging
import math
import time
from pathlib import Path

from blockpilot.control.cost import StepPrice, read_price
from blockpilot.evaluation.pricing import MOST_ERROR, holds_here, measure_price, mixtures_for, time_steps
from blockpilot.pairs.loading import Pair
from blockpilot.storage import CACHE, write_text

FOLDER = CACHE / "prices"
TOLERANCE = 1.3  # between measured / predicted seconds of a plain and of a drafting step; noise alone: 1.16
LONGEST_AGE_S = 30 * 24 * 3600.0  # by then drivers, libraries or other users of the machine may have changed
log = logging.getLogger("ray.serve.blockpilot")  # the servers' log


def kept_price(pair: Pair, rows: int, context: int, folder: Path | None = None) -> StepPrice:
    """Cached step cost, scaled to the machine's current speed, or a newly measured one, which is cached.

    Each pair, dtype, device, number of rows, context and choice of timed steps has a file. It is replaced if it is
    old or damaged, or if its ratio of a plain to a drafting step no longer holds. An uncertain cost is not cached.
    """
    key = repr((pair.id, str(pair.target.dtype), str(pair.target.device), rows, context, mixtures_for(pair, rows)))
    file = (folder or FOLDER) / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    price = _read(file, pair)
    pace = None if price is None else _pace(pair, price, context)
    if price is not None and pace is not None:
        log.info("step cost kept", extra={"age_s": round(time.time() - file.stat().st_mtime), "pace": round(pace, 3)})
        return price.with_coefficients(price.coefficients * pace)
    price = measure_price(pair, rows, context)
    if price.error > MOST_ERROR:
        log.warning("the step cost is uncertain (error %.2f) and not kept: is the machine busy?", price.error)
        return price
    try:
        write_text(file, price.to_json())
    except OSError as error:
        log.warning("the step cost is not kept: %s", error)
    return price


def _read(file: Path, pair: Pair) -> StepPrice | None:
    try:
        if time.time() - file.stat().st_mtime > LONGEST_AGE_S:
            return None
        price = read_price(str(file))
    except (OSError, ValueError):
        return None
    return price if holds_here(price, pair) else None


def _pace(pair: Pair, price: StepPrice, context: int) -> float | None:
    """Measured over predicted seconds (geometric mean of a plain and a drafting step); None if the two differ."""
    mixtures = mixtures_for(pair, 1)
    timed = time_steps(pair, [mixtures[0], mixtures[4]], context)
    paces = [step.seconds / price.seconds(step.load) for step in timed]
    return None if max(paces) > TOLERANCE * min(paces) else math.sqrt(paces[0] * paces[1])
