//! Draws each picture of the README.

use super::figures::{FigureError, Page};
use super::svg::{Style, Svg};

const LEFT: f64 = 16.0;

/// Draws one GPU with three pods, shared without and with limits.
pub(super) fn before_after() -> String {
    const GPU: (f64, f64) = (120.0, 200.0);
    let mut svg = Svg::new(760.0, 300.0);
    let gib = |amount: f64| amount / 80.0 * GPU.1;
    for (x, title, parts, remarks) in [
        (
            LEFT,
            "Time-slicing: no limits",
            &[
                (Style::Greedy, 62.0, "notebook"),
                (Style::Calm, 16.0, "server"),
                (Style::Other, 2.0, "job"),
            ][..],
            &[
                (Style::Text, "notebook allocates 62 GiB"),
                (Style::Text, "server: CUDA out of memory"),
                (Style::Text, "job: CUDA out of memory"),
            ][..],
        ),
        (
            LEFT + 380.0,
            "Bursar: each pod has its amount",
            &[
                (Style::Greedy, 16.0, "notebook"),
                (Style::Calm, 40.0, "server"),
                (Style::Other, 24.0, "job"),
            ][..],
            &[
                (Style::Text, "notebook: out of memory at 16 GiB"),
                (Style::Text, "server has its 40 GiB"),
                (Style::Text, "job has its 24 GiB"),
            ][..],
        ),
    ] {
        svg.text(Style::Title, (x, 26.0), title);
        svg.text(Style::Faint, (x, 46.0), "one GPU of 80 GiB");
        let mut top = 60.0;
        for (style, amount, name) in parts {
            let height = gib(*amount);
            svg.rect(*style, (x, top), (GPU.0, height));
            if height > 14.0 {
                svg.text(Style::Text, (x + 10.0, top + 16.0), name);
            }
            top += height;
        }
        svg.rect(Style::Frame, (x, 60.0), GPU);
        for (number, (style, remark)) in remarks.iter().enumerate() {
            svg.text(
                *style,
                (x + GPU.0 + 14.0, 80.0 + 24.0 * number as f64),
                remark,
            );
        }
    }
    svg.finish("One GPU of 80 GiB shared by three pods, by time-slicing and by Bursar")
}

/// Draws commands with their output as a terminal shows them. A line that is too long goes on in
/// the next one.
pub(super) fn terminal(commands: &[(&str, String)]) -> String {
    const COLUMNS: usize = 130;
    const LINE: f64 = 17.0;
    const CHARACTER: f64 = 7.25;
    let mut lines = Vec::new();
    for (number, (command, output)) in commands.iter().enumerate() {
        if number > 0 {
            lines.push(String::new());
        }
        lines.push(format!("$ {command}"));
        for line in output.lines() {
            let characters: Vec<char> = line.chars().collect();
            lines.extend(characters.chunks(COLUMNS).map(String::from_iter));
        }
    }
    let width = COLUMNS as f64 * CHARACTER + 2.0 * LEFT;
    let height = lines.len() as f64 * LINE + 2.0 * LEFT;
    let mut svg = Svg::new(width, height);
    svg.rect(Style::Panel, (0.5, 0.5), (width - 1.0, height - 1.0));
    for (number, line) in lines.iter().enumerate() {
        let bottom = LEFT + LINE * (number as f64 + 0.75);
        svg.text(Style::Output, (LEFT, bottom), line);
    }
    svg.finish("kubectl bursar top and kubectl bursar explain in a terminal")
}

/// Draws the way of a pod from its request to its first allocation.
pub(super) fn way_of_a_pod() -> String {
    const BOX: (f64, f64) = (132.0, 92.0);
    const GAP: f64 = 18.0;
    let steps: [(&str, &[&str]); 5] = [
        (
            "scheduler",
            &["counts GiB like", "CPUs and picks", "a node"],
        ),
        (
            "kubelet",
            &["asks the agent", "just before the", "container starts"],
        ),
        (
            "agent",
            &["binds one GPU", "with room, or", "lets the pod wait"],
        ),
        ("shim", &["is libcuda.so.1;", "charges what", "allocates"]),
        ("driver", &["gets every call", "that the quota", "covers"]),
    ];
    let mut svg = Svg::new(2.0 * LEFT + 5.0 * BOX.0 + 4.0 * GAP, 124.0);
    for (number, (name, lines)) in steps.iter().enumerate() {
        let x = LEFT + number as f64 * (BOX.0 + GAP);
        svg.rect(Style::Panel, (x, 16.0), BOX);
        svg.text(Style::Title, (x + 10.0, 38.0), name);
        for (row, line) in lines.iter().enumerate() {
            svg.text(Style::Faint, (x + 10.0, 58.0 + 16.0 * row as f64), line);
        }
        if number > 0 {
            svg.arrow((x - GAP + 1.0, 62.0), GAP - 2.0);
        }
    }
    svg.finish("The way of a pod: scheduler, kubelet, agent, shim, driver")
}

/// Draws the restart of a process in place after a fault, beside a restart by the kubelet.
pub(super) fn restart(page: &Page<'_>) -> Result<String, FigureError> {
    const COLUMN: &str = "restarted in place, 40 GiB retained";
    const WIDTH: f64 = 560.0;
    let steps = [
        (
            "the new image's first line",
            Style::Failed,
            "fault, decision, exec",
        ),
        ("`cuInit`", Style::Base, "cuInit"),
        ("context", Style::Calm, "context"),
        ("verify", Style::Other, "memory verified"),
    ];
    let figures = steps.map(|(row, style, name)| Ok((style, name, page.figure(row, COLUMN)?)));
    let mut svg = Svg::new(760.0, 190.0);
    let whole = page.figure("**the first correct kernel**", COLUMN)?;
    svg.text(
        Style::Title,
        (LEFT, 26.0),
        "From a fault to the first correct kernel",
    );
    let mut x = LEFT;
    for (number, figure) in figures.into_iter().enumerate() {
        let (style, name, milliseconds) = figure?;
        let width = milliseconds / whole * WIDTH;
        svg.rect(style, (x, 44.0), (width, 26.0));
        x += width;
        let legend = LEFT + 180.0 * number as f64;
        svg.rect(style, (legend, 84.0), (10.0, 10.0));
        svg.text(
            Style::Faint,
            (legend + 16.0, 94.0),
            &format!("{name}: {milliseconds:.0} ms"),
        );
    }
    svg.text(
        Style::Text,
        (LEFT + WIDTH + 12.0, 62.0),
        &format!("{whole:.0} ms, 40 GiB kept"),
    );
    svg.text(
        Style::Title,
        (LEFT, 130.0),
        "The same with a restart by the kubelet",
    );
    svg.rect(Style::Failed, (LEFT, 146.0), (WIDTH + 160.0, 26.0));
    svg.text(
        Style::Text,
        (LEFT + 10.0, 164.0),
        "CrashLoopBackOff: 10 s, 20 s, 40 s, ... up to 300 s; then the weights load from the disk again",
    );
    Ok(svg.finish("A restart in place after a fault, beside a restart by the kubelet"))
}

/// Draws the cost of calls through the shim as a ratio to the driver alone.
pub(super) fn overhead(page: &Page<'_>) -> Result<String, FigureError> {
    const BAR: f64 = 380.0;
    let rows = [
        ("`cuInit`", "cuInit and context"),
        ("`cuMemAlloc`", "cuMemAlloc + cuMemFree, 2 MiB"),
        ("`cuMemAllocAsync`", "cuMemAllocAsync + FreeAsync, 1 MiB"),
        ("launch of an empty kernel", "launch of an empty kernel"),
    ];
    let mut svg = Svg::new(760.0, 50.0 + 34.0 * rows.len() as f64);
    svg.text(
        Style::Title,
        (LEFT, 26.0),
        "Time of a call through the shim; the driver alone is 1",
    );
    for (number, (row, name)) in rows.iter().enumerate() {
        let y = 44.0 + 34.0 * number as f64;
        let ratio = page.figure(row, "shim")?;
        svg.text(Style::Text, (LEFT, y + 17.0), name);
        svg.rect(Style::Base, (LEFT + 260.0, y), (BAR, 10.0));
        svg.rect(Style::Calm, (LEFT + 260.0, y + 12.0), (BAR * ratio, 10.0));
        svg.text(
            Style::Text,
            (LEFT + 276.0 + BAR * ratio, y + 22.0),
            &format!("{ratio:.3}"),
        );
    }
    Ok(svg.finish("The cost of calls through the shim"))
}

/// Draws the tokens a second of language model servers, without Bursar and in pods.
pub(super) fn serving(page: &Page<'_>) -> Result<String, FigureError> {
    const BAR: f64 = 400.0;
    const NATIVE: &str = "without Bursar";
    const PODS: &str = "in pods of 16 GiB";
    let rows = [
        ("one server", "one server"),
        ("two servers at the same time", "two servers"),
        ("two servers beside", "two servers beside a greedy program"),
    ];
    let figures =
        rows.map(|(row, name)| Ok((name, [page.figure(row, NATIVE)?, page.figure(row, PODS)?])));
    let figures = figures.into_iter().collect::<Result<Vec<_>, _>>()?;
    let most = figures.iter().flat_map(|(_, pair)| pair);
    let most = most.copied().fold(1.0, f64::max);
    let mut svg = Svg::new(760.0, 74.0 + 40.0 * figures.len() as f64);
    svg.text(
        Style::Title,
        (LEFT, 26.0),
        "vLLM on one H200: tokens a second",
    );
    for (number, (style, name)) in [(Style::Base, NATIVE), (Style::Calm, PODS)]
        .iter()
        .enumerate()
    {
        let x = LEFT + 160.0 * number as f64;
        svg.rect(*style, (x, 38.0), (10.0, 10.0));
        svg.text(Style::Faint, (x + 16.0, 48.0), name);
    }
    for (number, (name, pair)) in figures.iter().enumerate() {
        let y = 64.0 + 40.0 * number as f64;
        svg.text(Style::Text, (LEFT, y + 18.0), name);
        for (row, (style, tokens)) in [Style::Base, Style::Calm].into_iter().zip(pair).enumerate() {
            let (y, width) = (y + 14.0 * row as f64, BAR * tokens / most);
            svg.rect(style, (LEFT + 240.0, y), (width, 12.0));
            svg.text(
                Style::Faint,
                (LEFT + 248.0 + width, y + 10.0),
                &format!("{tokens:.0}"),
            );
        }
    }
    Ok(svg.finish("Tokens a second of vLLM servers without Bursar and in pods"))
}
