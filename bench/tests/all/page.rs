//! The page of `--html`: what is in it, and how a browser shows it.

use crate::command::short;
use netmem_testing::{installed, skip};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// Whether there are two CPUs.
fn two() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1)
}

/// The table and the page of a run of all suites, with two threads if there are two CPUs.
fn reports() -> &'static (String, String) {
    static REPORTS: OnceLock<(String, String)> = OnceLock::new();
    REPORTS.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("all.html");
        std::fs::write(&file, "x".repeat(1 << 20)).unwrap();
        let threads = if two() { "1,2" } else { "1" };
        let table = short(&["all", "--threads", threads, "--html", file.to_str().unwrap()]);
        (table, std::fs::read_to_string(&file).unwrap())
    })
}

#[test]
fn a_table_and_a_page_that_loads_nothing() {
    let (table, page) = reports();
    let words = ["suite refs", "percpuref_rotating", "x refcount", "percpu", "skipped: ", "Goals"];
    for word in words.into_iter().chain([
        "suite pool",
        "in_context_fifo",
        "of 100G",
        "x malloc",
        "leaked 0",
        "suite tokens",
        "ranges_mixed",
        "x locked_map",
        "memory_page_ranges",
        "suite devmem",
        "percpuref+ranges",
    ]) {
        assert!(table.contains(word), "{word}: {table}");
    }
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
    well_formed(page);
    // Contents: each link leads to one place, and each suite and section has a link.
    let (links, places) = (quoted(page, "href=\"#"), quoted(page, " id=\""));
    for link in &links {
        assert_eq!(places.iter().filter(|place| *place == link).count(), 1, "{link}");
    }
    assert!(places.iter().all(|place| links.contains(place) || place.ends_with("-goals")), "{places:?}");
    // No address, no script, no other file.
    for loads in ["://", "<script", "<link", "src=", "@import", "url("] {
        assert!(!page.contains(loads), "{loads}");
    }
}

/// The summary comes first. Each suite has its question, its headline, the machine, the command,
/// the goals with their verdicts, and charts and tables.
#[test]
fn each_suite_has_its_question_and_the_answer() {
    let (_, page) = reports();
    let (front, suites) = page.split_once("<section class=\"suite\"").unwrap();
    let suites: Vec<&str> = suites.split("<section class=\"suite\"").collect();
    let names = ["refs", "pool", "tokens", "devmem", "streams"];
    assert_eq!(suites.len(), names.len());
    for word in ["targets reached", "<p class=\"headline ", "How to read"] {
        assert!(front.contains(word), "{word}: {front}");
    }
    assert!(!front.contains("fewer runs") && !front.contains("not run:"), "{front}");
    // Without --long, rows that take long are not measured.
    assert!(front.contains("bulk: CPU") && !front.contains("cost of a segment"), "{front}");
    for (suite, name) in suites.into_iter().zip(names) {
        assert!(front.contains(&format!("<a href=\"#{name}\">{name}</a>")), "{name}");
        let question = quoted_text(suite, "<p class=\"question\">");
        assert!(question.ends_with('?') && front.contains(question), "{question}");
        let headline = quoted_text(suite, "<p class=\"headline ");
        assert!(headline.contains("target") && headline.ends_with('.'), "{headline}");
        for word in ["<dt>Machine</dt>", "<dt>Kernel</dt>", "<table>", "class=\"range\"", "class=\"verdict "] {
            assert!(suite.contains(word), "{name}: {word}");
        }
        let runs = quoted_text(suite, "<dt>Runs, made</dt><dd>");
        assert!(runs.starts_with("2 of each row</dd>") || runs.starts_with("none</dd>"), "{name}: {runs}");
        let command = quoted_text(suite, "<pre class=\"command\"");
        assert!(command.contains("<code>cargo run --release -p netmem-bench -- "), "{command}");
        assert!(command.contains(&format!("-- {name} --threads 1")), "{command}");
        assert!(command.contains(" --duration 0.001 --runs 2"), "{command}");
        // A chart has a row for each measured one, with its number.
        assert_eq!(suite.matches("<span class=\"value\">").count(), suite.matches("<span class=\"label\">").count());
    }
}

/// A row that was measured with several numbers of threads has a curve: a line of the table, and a
/// panel with a point and a label for each number.
#[test]
fn rows_with_several_numbers_of_threads_have_curves() {
    let (table, page) = reports();
    let blocks: Vec<&str> = table.split("by threads").skip(1).collect();
    let panels: Vec<&str> = page.split("<p class=\"panel-name\">").skip(1).collect();
    let mut lines = 0;
    for block in &blocks {
        let mut block = block.lines();
        let columns: Vec<_> = block.next().unwrap().split_whitespace().collect();
        // Answers of the server are measured with more threads than there are CPUs: their curves
        // are the only ones of a machine with one CPU.
        assert!(columns.starts_with(&["1", "2"]), "{columns:?}");
        // A name, and a value in each column.
        for line in block.take_while(|line| !line.is_empty() && !line.starts_with(' ')) {
            assert!(line.split_whitespace().count() > columns.len(), "{line}");
            lines += 1;
        }
    }
    assert_eq!(lines, panels.len());
    let names = ["percpuref", "refcount_rotating", "shared", "ranges_mixed", "kill_64"];
    for name in names.into_iter().filter(|_| two()) {
        let of: Vec<_> = panels.iter().filter(|panel| panel.starts_with(&format!("{name}<"))).collect();
        assert!(!of.is_empty(), "{name}");
        for panel in of {
            let panel = panel.split_once("</svg></div>").unwrap().0;
            let numbers =
                ["<circle class=\"point", "<line class=\"step\"", "<text "].map(|part| panel.matches(part).count());
            assert_eq!(numbers, [2, 1, 2], "{panel}");
        }
    }
    // It has one number of threads.
    assert!(!panels.iter().any(|panel| panel.starts_with("in_context<") || panel.starts_with("memory_page_ranges<")));
}

/// The widths at which the page is looked at: a telephone, the narrowest screen that has names,
/// tracks and numbers next to each other, and a desk.
const WIDTHS: [u32; 3] = [400, 900, 1400];

/// Chromium lays the page out at each width, light and dark: nothing is wider than the screen, no
/// label leaves its chart or covers another, each point can be seen on its track, and no point or
/// text hides another. Text has the contrast that is asked for people who see less (4.5), and so do
/// points (3).
#[test]
fn a_browser_shows_all_of_it() {
    if let Err(why) = installed(&["chromium"]) {
        return skip(&why);
    }
    let (_, page) = reports();
    let widest = with_the_widest_numbers(page);
    for dark in [false, true] {
        let found = probe(&WIDTHS.map(|width| (width, if dark { page.clone() } else { widest.clone() })), dark);
        for frame in &found {
            let seen = |key: &str| frame[key].as_u64().unwrap_or_else(|| panic!("{key} of {frame}"));
            assert_eq!((seen("width"), frame["dark"].as_bool()), (seen("asked"), Some(dark)), "{frame}");
            assert_eq!(seen("panels") > 40, two(), "{frame}");
            assert!(seen("charts") > 40 && seen("points") > 200 && seen("texts") > 1000, "{frame}");
            let problems = frame["problems"].as_array().unwrap();
            assert!(problems.is_empty(), "{} pixels, dark: {dark}: {problems:#?}", seen("asked"));
        }
        assert_eq!(found.len(), WIDTHS.len());
    }
}

/// The page with the longest texts that a measured value can have, in place of what was measured.
fn with_the_widest_numbers(page: &str) -> String {
    let value = "<span class=\"value\"><b>";
    let mut pieces = page.split(value);
    let mut widest = pieces.next().unwrap().to_owned();
    for piece in pieces {
        let (number, rest) = piece.split_once("</b>").unwrap();
        let unit = number.split_once(' ').map_or("", |(_, unit)| unit);
        let rest = rest.strip_prefix(" <span>").map_or(rest, |range| range.split_once("</span>").unwrap().1);
        widest += &format!("{value}0.00013 {unit}</b> <span>0.00012..9.99e300</span>{rest}");
    }
    widest
}

/// Each fault that `probe.js` looks for is reported: here a style makes it.
#[test]
fn the_faults_of_a_page_are_found() {
    if let Err(why) = installed(&["chromium"]) {
        return skip(&why);
    }
    let (_, page) = reports();
    let faults = [
        ("main{width:120vw}", "the page has "),
        ("h1{color:#ddd}", "'Netmem benchmarks' has a contrast of "),
        ("h1{opacity:.3}", "'Netmem benchmarks' has a contrast of "),
        (".point{display:none}", ": a point cannot be seen"),
        (".point{visibility:hidden}", ": a point cannot be seen"),
        (".track{opacity:0}", ": a point cannot be seen"),
        (".point{r:0}", ": a point cannot be seen"),
        (".point{transform:translateY(20px)}", ": a point is outside of its track"),
        (".track.reached .point,.track.c0 .point{cx:103%}", ": a point is outside of its track"),
        (".point{fill:none}", ": a point has a contrast of 1.00"),
        (".point{fill:#eee}", ": a point has a contrast of 1."),
        (".point{fill-opacity:.2}", ": a point has a contrast of 1."),
        (".lane:not(.axis) .track{opacity:.3}", ": a point has a contrast of "),
        (".point.none{stroke:#eee}", ": a point has a contrast of 1."),
        (".lane .name{position:relative;left:18rem}", "covers a point"),
        (".lane .value{position:relative;left:-13rem}", "covers a point"),
        (".label *,.value{visibility:hidden}.lane{height:3px}", ": a point hides another"),
        (".lane .name{position:relative;left:-1rem}", "leaves the chart"),
        (".axis text{text-anchor:start}", "leaves the axis"),
        (".axis text{font-size:2rem}", "' covers '"),
        (".axis{padding-left:9px}", ": a track is not as wide as its axis"),
        (".chart.goals{--name:44%}", ": the axis has 2"),
        (".panel-name{position:relative;left:-1rem}", "' leaves the panel"),
        (".panel .ends{position:relative;top:-1.2em}", "' covers '"),
        (".columns text{transform:translateX(9px)}", ": a number of threads is not below its point"),
        (".panel .ends{position:relative;top:40px}", "covers a point of the curve"),
    ];
    let altered = faults.map(|(style, _)| (900, page.replace("</style>", &format!("{style}</style>"))));
    for (frame, (style, fault)) in probe(&altered, false).iter().zip(faults) {
        let problems = frame["problems"].as_array().unwrap();
        assert!(problems.iter().any(|one| one.as_str().unwrap().contains(fault)), "{style}: {fault}: {problems:#?}");
        // Points that cannot be seen are not counted.
        assert_eq!(frame["points"] == 0, fault == ": a point cannot be seen", "{style}: {}", frame["points"]);
    }
}

/// What `probe.js` finds in each page, which has a width. The pages are frames of one page, because
/// a window of Chromium has at least 500 pixels.
fn probe(pages: &[(u32, String)], dark: bool) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let frame = |(width, page): &(u32, String)| {
        let text = page.replace('&', "&amp;").replace('"', "&quot;");
        format!(
            "<iframe style=\"width:{width}px;height:900px;border:0\" data-width={width} srcdoc=\"{text}\"></iframe>"
        )
    };
    let script = include_str!("probe.js");
    let frames: String = pages.iter().map(frame).collect();
    let html =
        format!("<!DOCTYPE html><meta charset=utf-8><body>{frames}<pre id=found></pre><script>{script}</script>");
    let file = dir.path().join("probe.html");
    std::fs::write(&file, html).unwrap();
    let dump = chromium(dir.path(), dark, &file);
    // The dump escapes text.
    let found = dump.rsplit_once("<pre id=\"found\">").unwrap().1.split_once("</pre>").unwrap().0;
    let found = found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&found).unwrap_or_else(|error| panic!("{error}: {found}"))
}

/// The document after its scripts ran.
fn chromium(home: &Path, dark: bool, file: &Path) -> String {
    let scheme = if dark { 0 } else { 1 };
    let output = Command::new("chromium")
        // The sandbox needs privileges that a container has not; the only page is the test's own.
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1500,900"])
        .arg(format!("--user-data-dir={}", home.join("profile").display()))
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg("--dump-dom")
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("id=\"found\""), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

/// The text after `before` and the end of its tag, up to the end of the element.
fn quoted_text<'a>(page: &'a str, before: &str) -> &'a str {
    let rest = page.split_once(before).unwrap_or_else(|| panic!("no {before}: {page}")).1;
    let rest = if before.ends_with('>') { rest } else { rest.split_once('>').unwrap().1 };
    ["</p>", "</pre>"].iter().filter_map(|end| rest.find(end)).min().map_or(rest, |end| &rest[..end])
}

/// What follows `before` up to the next quotation mark, each time.
fn quoted<'a>(page: &'a str, before: &str) -> Vec<&'a str> {
    page.split(before).skip(1).map(|rest| rest.split_once('"').unwrap().0).collect()
}

/// Every element is closed where it must be, in the order in which they were opened, and every `<`
/// and `&` of text is escaped.
#[track_caller]
pub(crate) fn well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    for piece in page.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("<{piece}"));
        let entities = ["amp;", "lt;", "gt;", "quot;"];
        assert!(text.split('&').skip(1).all(|rest| entities.iter().any(|entity| rest.starts_with(entity))), "{text}");
        let name = tag.split_whitespace().next().unwrap();
        match name.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "{tag}"),
            None if tag.ends_with('/') || ["!DOCTYPE", "meta"].contains(&name) => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}
