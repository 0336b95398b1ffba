"""Texts that want to be something else: markup, paths, control characters, numbers without end."""

from __future__ import annotations

from hypothesis import strategies as st

MARKUP = (
    "</style></title></script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(2)>",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "&#60;b&#62;",
    "<svg/onload=a()>",
    "javascript:alert(1)",
    "a | b",
    "a \\| b",
    "\\",
    "\\\\|",
    "|",
    "``` x",
    "~~~",
    "`code`",
    "`` ` ``",
    "**bold** _it_",
    "# heading",
    "- item",
    "1. one",
    "+ x",
    "> quote",
    "---",
    "===",
    "[link](javascript:a)",
    "![picture](http://x/y.png)",
    "[a]: http://x",
    "<http://x>",
    "[bold]rich[/bold]",
    "[/]",
    "{x} %s %(a)s",
    "\n\n# heading\n\n- item",
    "\r\n",
    "a\n---\nb",
    "    code",
    "\tcode",
)
CONTROL = (
    "\x00",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x08\x08",
    "\x7f",
    "\x85",
    "\x9b31m",
    "\u202egnp.exe",
    "\u2028",
    "\ufeff",
    "\ud800",
)
PATHS = (
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..\\x",
    "a/b",
    "file://x",
    "C:\\x",
    ".",
    "..",
    "",
    " ",
    "~",
    "con",
    "x" * 300,
)
LONG = ("9" * 10_000, "a" * 50_000, "<" * 10_000, "\\" * 1_000)

ODD = MARKUP + CONTROL + PATHS
texts = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=12),
    st.lists(st.sampled_from(ODD) | st.text(max_size=4), min_size=2, max_size=3).map("".join),
    st.sampled_from(LONG),
)
storable = texts.map(lambda text: text.encode("utf-8", "replace").decode())  # JSON holds no half of a surrogate pair
