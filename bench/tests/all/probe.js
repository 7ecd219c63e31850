// Looks for what a person would see as a fault, in each frame: the page at one width.
const parse = colour => colour.match(/[\d.]+/g).map(Number);
const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const visible = box => box.width > 0 && box.height > 0;
// Whether a person can see an element that has this box.
const seen = (element, box) => visible(box) && element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
const within = (inner, outer) =>
    inner.left >= outer.left - 1 && inner.right <= outer.right + 1 && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
const overlap = (a, b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;

// The contrast of a colour of an element with what is behind it. Opacity mixes the two.
function contrast(view, element, colour, share = 1) {
    let behind = element;
    for (let at = element; at; at = at.parentElement) share *= view.getComputedStyle(at).opacity;
    while (behind.parentElement && view.getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const ground = parse(view.getComputedStyle(behind).backgroundColor), [r, g, b, alpha = 1] = parse(colour);
    const mixed = [r, g, b].map((c, n) => ground[n] + (c - ground[n]) * alpha * share);
    const [front, back] = [mixed, ground].map(luminance);
    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
}

// The boxes of all lines of text in an element, each with its element.
function lines(view, root) {
    const found = [], walk = view.document.createTreeWalker(root, view.NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode;
        if (!node.data.trim()) continue;
        const range = view.document.createRange();
        range.selectNodeContents(node);
        for (const box of range.getClientRects()) if (seen(node.parentElement, box)) found.push({ box, node, text: node.data.trim().slice(0, 40) });
    }
    return found;
}

// What is wrong with the point of a track, whose box is `box`.
function fault(view, point, box) {
    if (!seen(point, box)) return "cannot be seen";
    const track = point.ownerSVGElement.getBoundingClientRect(), x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    if (!within({ left: x, right: x, top: y, bottom: y }, track)) return "is outside of its track";
    // A hollow point has a border alone.
    const style = view.getComputedStyle(point), hollow = point.classList.contains("none");
    const colour = hollow ? style.stroke : style.fill;
    const ratio = colour === "none" ? 1 : contrast(view, point, colour, hollow ? style.strokeOpacity : style.fillOpacity);
    if (ratio < 3) return `has a contrast of ${ratio.toFixed(2)}`;
}

function chart(view, figure, wide, report) {
    const outer = figure.getBoundingClientRect(), name = figure.querySelector("figcaption").innerText.slice(0, 60);
    const texts = lines(view, figure);
    texts.forEach((one, n) => {
        if (!within(one.box, outer)) report(`${name}: '${one.text}' leaves the chart`);
        const svg = one.node.parentElement.ownerSVGElement;
        if (svg && !within(one.box, svg.getBoundingClientRect())) report(`${name}: '${one.text}' leaves the axis`);
        for (const other of texts.slice(n + 1)) {
            if (other.node !== one.node && overlap(one.box, other.box)) report(`${name}: '${one.text}' covers '${other.text}'`);
        }
    });
    const grid = figure.querySelector(".grid").getBoundingClientRect();
    for (const track of figure.querySelectorAll("svg.track")) {
        const box = track.getBoundingClientRect();
        if (visible(box) && (Math.abs(box.left - grid.left) > 1 || Math.abs(box.right - grid.right) > 1)) report(`${name}: a track is not as wide as its axis`);
    }
    // The labels of an axis are chosen for a width of 290 pixels.
    if (grid.width < 290) report(`${name}: the axis has ${grid.width} pixels`);
    if (grid.width < outer.width * (wide ? 0.35 : 0.9)) report(`${name}: the axis has ${grid.width} of ${outer.width} pixels`);
    const all = [...figure.querySelectorAll(".point")].map(point => [point, point.getBoundingClientRect()]);
    for (const [point, box] of all) {
        const what = fault(view, point, box);
        if (what) report(`${name}: a point ${what}`);
    }
    const points = all.filter(([point, box]) => seen(point, box)).map(([, box]) => box);
    points.forEach((one, n) => {
        for (const text of texts) if (overlap(one, text.box)) report(`${name}: '${text.text}' covers a point`);
        if (one.left < outer.left - 1 || one.right > outer.right + 1) report(`${name}: a point leaves the chart`);
        for (const other of points.slice(n + 1)) if (overlap(one, other)) report(`${name}: a point hides another`);
    });
    return { points: points.length, texts: texts.length };
}

// The panels of a figure of curves: each has its name, the values of its ends, and the numbers of threads below its points.
function curves(view, figure, report) {
    let points = 0;
    for (const panel of figure.querySelectorAll(".panel")) {
        const name = panel.querySelector(".panel-name").innerText, outer = panel.getBoundingClientRect(), texts = lines(view, panel);
        texts.forEach((one, n) => {
            if (!within(one.box, outer)) report(`${name}: '${one.text}' leaves the panel`);
            for (const other of texts.slice(n + 1)) {
                if (other.node !== one.node && overlap(one.box, other.box)) report(`${name}: '${one.text}' covers '${other.text}'`);
            }
        });
        const all = [...panel.querySelectorAll(".point")], seenHere = all.filter(point => seen(point, point.getBoundingClientRect()));
        for (const point of all) {
            const what = fault(view, point, point.getBoundingClientRect());
            if (what) report(`${name}: a point ${what}`);
        }
        const labels = [...panel.querySelectorAll(".columns text")].map(text => text.getBoundingClientRect());
        if (labels.length !== all.length) report(`${name}: ${all.length} points have ${labels.length} numbers of threads`);
        seenHere.forEach((point, n) => {
            const box = point.getBoundingClientRect(), middle = (box.left + box.right) / 2, label = labels[n];
            if (label && Math.abs((label.left + label.right) / 2 - middle) > 1.5) report(`${name}: a number of threads is not below its point`);
            for (const text of texts) if (overlap(box, text.box)) report(`${name}: '${text.text}' covers a point of the curve`);
            for (const other of seenHere.slice(n + 1)) if (overlap(box, other.getBoundingClientRect())) report(`${name}: a point hides another of the curve`);
        });
        points += seenHere.length;
    }
    return points;
}

function look(frame) {
    const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement, problems = [];
    const report = what => problems.length < 20 && problems.push(what);
    page.querySelectorAll("details").forEach(details => { details.open = true; });
    if (root.scrollWidth > root.clientWidth) report(`the page has ${root.scrollWidth} pixels, the screen ${root.clientWidth}`);
    let texts = 0, points = 0;
    for (const element of page.querySelectorAll("main *")) {
        const box = element.getBoundingClientRect(), scrolls = element.parentElement.closest(".scroll");
        if (visible(box) && !scrolls && (box.left < -0.5 || box.right > root.clientWidth + 0.5)) report(`<${element.tagName} ${element.className}> leaves the screen`);
    }
    for (const { node, text, box } of lines(view, page.querySelector("main"))) {
        const parent = node.parentElement, style = view.getComputedStyle(parent);
        const ratio = contrast(view, parent, parent instanceof view.SVGElement ? style.fill : style.color);
        if (ratio < 4.5) report(`'${text}' has a contrast of ${ratio.toFixed(2)}`);
        if (!parent.closest(".scroll") && (box.left < 0 || box.right > root.clientWidth)) report(`'${text}' leaves the screen`);
        texts++;
    }
    const figures = page.querySelectorAll("figure.chart");
    for (const figure of figures) points += chart(view, figure, view.matchMedia("(min-width: 56.01rem)").matches, report).points;
    const panels = page.querySelectorAll(".panel").length;
    for (const figure of page.querySelectorAll("figure.curves")) points += curves(view, figure, report);
    const asked = Number(frame.dataset.width), dark = luminance(parse(view.getComputedStyle(page.body).backgroundColor)) < 0.2;
    return { asked, width: view.innerWidth, dark, charts: figures.length, panels, points, texts, problems };
}

addEventListener("load", () => {
    const found = [...document.querySelectorAll("iframe")].map(look);
    document.getElementById("found").textContent = JSON.stringify(found);
});
