"""All forms in which programs say what went wrong, in the order they are tried.

Covers: the order. Does not cover: what a form is (``log_form``), which line of a log
decides (``log_reading``).
"""

from __future__ import annotations

import re

from oomrun.core.log_form import Form
from oomrun.core.log_forms_device import DEVICE_GENERAL, DEVICE_PARTICULAR
from oomrun.core.log_forms_host import HOST_GENERAL, HOST_MEMORY
from oomrun.core.log_forms_limits import NOT_DEVICE_MEMORY
from oomrun.core.log_forms_other import NO_MEMORY
from oomrun.core.log_forms_translated import TRANSLATED, TRANSLATED_WORDS

__all__ = ["FORMS", "MAY_MATTER"]

#: The first that matches a line is what the line says: the particular before the
#: general, and what is harmless before what uses the same words in earnest.
FORMS: tuple[Form, ...] = (
    *NOT_DEVICE_MEMORY,
    *DEVICE_PARTICULAR,
    *HOST_MEMORY,
    *DEVICE_GENERAL,
    *HOST_GENERAL,
    *TRANSLATED,
    *NO_MEMORY,
)

# What every form of the table has a word of; most lines have none, and are done.
MAY_MATTER = re.compile(
    r"(?i)memory|\boom|exhaust|alloc|cuda|cudnn|cublas|cusolver|nccl|hip|miopen|blas"
    r"|space|quota|enospc|edquot|enomem|errno|protobuf|proto\b|message|2 ?gi?b"
    r"|liveness|wall ?(?:clock|time)|tempstate"
    r"|shm|bus error|disk|storage|capacity|contex|algorithm|workspace|xid|gpu"
    r"|launch|assert|driver|library|shared object|error|exception|interrupt|no such"
    r"|not found|unrecognized|kill|memlimit|rss|preempt|cancel|deadline|due to|sigterm"
    r"|signal|evict|shutdown|drain|spot|jobstate|state|out_of|term_|stalled|ranks"
    r"|timed? ?out|blocked|peer|socket|horovod|broken|collective|refused|disappear"
    r"|unreachable|thread|unavailable|too many|fault|check failed|core dumped"
    r"|dst tensor"
    r"|exit(?:\b|_)|serialize|larger|beyond|condition|resource|hresult|plan: ?\d|ram\b"
    r"|\bmem\b|cusparse|hsa_status|bandwidth|enhance|rate limit|inotify|kernel"
    r"|task registered|failed to connect|too large|sigxfsz|disruption|paging"
    r"|terminated|exitcode|mmap"
    r"|corrupt|free\(\)|munmap"
    r"|removed|taskoom|0xc00000|winerror|nodes are|stockout|provision|tactic|limit"
    rf"|(?-i:{TRANSLATED_WORDS.pattern})"
)
