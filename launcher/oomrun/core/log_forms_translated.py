"""Forms in other languages: what the C library and shells print in a locale.

Covers: no memory, no space, killed, a segmentation or bus fault, in the languages that
clusters are set up in. Does not cover: TensorFlow, which speaks English only. See
``log_forms``.
"""

from __future__ import annotations

import re

from oomrun.core.log_form import Form, form, pieces

__all__ = [
    "TRANSLATED", "TRANSLATED_EXHAUSTIONS", "TRANSLATED_NO_MEMORY", "TRANSLATED_WORDS"
]  # fmt: skip

# German, French (twice), Spanish, Italian, Portuguese, Polish, Russian, Chinese,
# Japanese, Korean.
_NO_MEMORY = (
    r"Nicht genügend (?:Hauptspeicher|Speicher)|Speicher (?:kann )?nicht (?:zugewiesen"
    r"|alloziert|reserviert)",
    r"(?:Ne peut|Impossible d['’]) ?allouer (?:de la |la )?mémoire",
    r"[Nn]o se (?:pudo|puede) asignar (?:la )?memoria",
    r"[Ii]mpossibile allocare (?:la )?memoria",
    r"[Nn]ão (?:foi possível|pode|é possível) alocar memória",
    r"[Nn]ie można przydzielić pamięci",
    r"[Нн]евозможно выделить память|[Нн]е удалось выделить память",
    r"无法分配内存|不能分配内存|無法配置記憶體",
    r"メモリ(?:ー)?を(?:確保|割り当て)",
    r"메모리를 할당할 수 없",
    # Windows: the paging file is too small.
    r"页面文件太小|分頁檔太小|Auslagerungsdatei ist zu klein|Файл подкачки слишком мал",
    r"[Ff]ichier de pagination est insuffisant|[Ff]ile di paging insufficiente",
    r"[Aa]rchivo de paginación es demasiado|[Aa]rquivo de paginação é muito",
    r"[Pp]lik stronicowania jest za",
    r"ページング ファイルが小さすぎる|페이징 파일이 너무 작",
)
#: The same, for a form of another table that must leave it out.
TRANSLATED_NO_MEMORY = "|".join(_NO_MEMORY)
_NO_SPACE = (
    r"kein Speicherplatz (?:mehr )?(?:verfügbar|auf dem Gerät)",
    r"kein Platz (?:mehr )?(?:verfügbar|auf dem Gerät)",
    r"Aucun espace disponible sur le périphérique|[Pp]lus d['’]espace disponible",
    r"[Nn]o queda espacio en el dispositivo",
    r"[Ss]pazio esaurito sul device|[Ss]pazio sul device esaurito",
    r"[Nn]ão (?:há|existe) espaço disponível no dispositivo",
    r"[Bb]rak (?:wolnego )?miejsca na urządzeniu",
    r"[Нн]а устройстве (?:не осталось|нет) (?:свободного )?места",
    r"设备上没有空间|裝置上已無多餘空間|デバイスに空き領域がありません",
    r"장치에 남은 공간이 없",
)
_KILLED = (
    r"\bGetötet\b|\bProcessus arrêté\b|\bTué\b|\bMatado\b|\bUcciso\b|\bMorto\b",
    r"\bTerminado \(killed\)|\bUnicestwiony\b|\bУбито\b|已杀死|已被殺死",
    r"強制終了|죽었음",
)
_FAULT = (
    r"Speicherzugriffsfehler|Erreur de segmentation|[Vv]iolación de segmento",
    r"Errore di segmentazione|Falha de segmentação|Naruszenie ochrony pamięci",
    r"Ошибка сегментирования|段错误|程式記憶體區段錯誤|세그멘테이션",
)
_BUS = (r"Bus-Zugriffsfehler|Bus-Fehler|[Ee]rreur du bus|[Ee]rror del bus|总线错误",)

TRANSLATED: tuple[Form, ...] = (
    form("host_allocator", "error", *_NO_MEMORY),
    form("disk", "error", *_NO_SPACE),
    form("shm", "killed", *_BUS),
    form("host_killed", "killed", *_KILLED),
    form("crash", "other", *_FAULT),
)

#: For the filter before all forms.
TRANSLATED_WORDS = re.compile(
    "|".join((*_NO_MEMORY, *_NO_SPACE, *_KILLED, *_FAULT, *_BUS))
)

#: Of memory or a disk that ran out; for a search that knows no patterns.
TRANSLATED_EXHAUSTIONS = tuple(
    piece for pattern in (*_NO_MEMORY, *_NO_SPACE) for piece in pieces(pattern)
)
