#!/usr/bin/env -S python3 -B
"""links.py DIR: checks that each link in the HTML files under DIR that leads to another file (or part of one) on this machine leads
somewhere. Prints the dead ones. Links to the standard library and other places on the web are not followed, nor is one that
rustdoc copies from the documentation of tracing's traits to the page of each type, and that is dead there."""
import html.parser
import pathlib
import sys
import urllib.parse

TRACING = "dispatcher#setting-the-default-subscriber"


class Page(html.parser.HTMLParser):
    """The links of a page, and the names that links can lead to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.names = set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.names.add(attrs.get("id"))
        if tag == "a" and attrs.get("href"):
            self.links.add(attrs["href"])


pages = {path.resolve(): Page(path) for path in pathlib.Path(sys.argv[1]).rglob("*.html")}
links, dead = 0, []
for path, page in pages.items():
    for link in page.links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or url.netloc or link == TRACING:
            continue
        links += 1
        target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
        names = {url.fragment, urllib.parse.unquote(url.fragment)}
        if not target.exists() or (url.fragment and target in pages and not names & pages[target].names):
            dead.append(f"{path}: {link}")
print(*sorted(dead), f"{len(pages)} pages, {links} links, {len(dead)} dead", sep="\n")
sys.exit(bool(dead) or not links)
