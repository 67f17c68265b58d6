//! Compares the numbers in the pictures, which are written by hand, with the pages and recorded
//! outputs that they show.

use crate::paths;

fn read(path: &str) -> String {
    std::fs::read_to_string(paths::repository().join(path)).unwrap()
}

/// Returns the texts of a picture in their order.
fn texts(picture: &str) -> Vec<String> {
    let svg = read(&format!("docs/pictures/{picture}.svg"));
    let elements = svg.split("<text ").skip(1);
    let texts = elements.filter_map(|element| element.split_once('>')?.1.split_once("</text>"));
    let unescape = |text: &str| text.replace("&lt;", "<").replace("&gt;", ">");
    texts.map(|(text, _)| unescape(text)).collect()
}

/// Returns the first number of a cell of `docs/internals/benchmarks.md`, by the beginning of its
/// row and the heading of its column.
fn figure(page: &str, row: &str, column: &str) -> f64 {
    let cells = |line: &str| -> Vec<String> {
        line.split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let tables = page.split("\n\n").filter(|block| block.starts_with('|'));
    let mut cell = tables.filter_map(|table| {
        let heading = cells(table.lines().next()?);
        let at = heading.iter().position(|name| name == column)?;
        let mut rows = table.lines().skip(2).map(cells);
        rows.find(|cells| cells[1].starts_with(row))?
            .get(at)
            .cloned()
    });
    let cell = cell
        .next()
        .unwrap_or_else(|| panic!("no row {row:?} with {column:?}"));
    let number = cell.trim_start_matches(|c: char| !c.is_ascii_digit());
    let number = number
        .split(|c: char| !c.is_ascii_digit() && !".,".contains(c))
        .next();
    number.unwrap().replace(',', "").parse().unwrap()
}

/// A text of `picture` that shows the figures of a row, with so many decimals. Adjacent texts are
/// separated by `|`.
#[rustfmt::skip]
const SHOWN: [(&str, &str, &str, &[&str], usize); 12] = [
    ("restart", "fault, decision, exec: {} ms", "the new image's first line", RESTARTED, 0),
    ("restart", "cuInit: {} ms", "`cuInit`", RESTARTED, 0),
    ("restart", "context: {} ms", "context", RESTARTED, 0),
    ("restart", "memory verified: {} ms", "verify", RESTARTED, 0),
    ("restart", "{} ms, 40 GiB kept", "**the first correct kernel**", RESTARTED, 0),
    ("overhead", "cuInit and context|{}", "`cuInit`", &["shim"], 3),
    ("overhead", "cuMemAlloc + cuMemFree, 2 MiB|{}", "`cuMemAlloc`", &["shim"], 3),
    ("overhead", "cuMemAllocAsync + FreeAsync, 1 MiB|{}", "`cuMemAllocAsync`", &["shim"], 3),
    ("overhead", "launch of an empty kernel|{}", "launch of an empty kernel", &["shim"], 3),
    ("serving", "one server|{}|{}", "one server", SERVED, 0),
    ("serving", "two servers|{}|{}", "two servers at the same time", SERVED, 0),
    ("serving", "two servers beside a greedy program|{}|{}", "two servers beside", SERVED, 0),
];

const RESTARTED: &[&str] = &["restarted in place, 40 GiB retained"];
const SERVED: &[&str] = &["without Bursar", "in pods of 16 GiB"];

#[test]
fn pictures_show_the_figures_of_the_benchmarks() {
    let page = read("docs/internals/benchmarks.md");
    for (picture, shown, row, columns, decimals) in SHOWN {
        let expected = columns.iter().fold(shown.to_owned(), |text, column| {
            let figure = figure(&page, row, column);
            text.replacen("{}", &format!("{figure:.decimals$}"), 1)
        });
        let texts = format!("|{}|", texts(picture).join("|"));
        let is_shown = texts.contains(&format!("|{expected}|"));
        assert!(is_shown, "{picture}.svg lacks {expected:?}: {texts}");
    }
}

#[test]
fn terminal_picture_shows_the_recorded_outputs() {
    let golden = |name: &str| read(&format!("operator/cli/tests/golden/{name}.txt"));
    let (top, explain) = (golden("top"), golden("explain-waiting-128"));
    let expected =
        format!("$ kubectl bursar top{top}$ kubectl bursar explain pod big-0 -n ml{explain}");
    assert_eq!(texts("kubectl-bursar").concat(), expected.replace('\n', ""));
}
