//! Writes SVG documents that follow the reader's light or dark theme.

use std::fmt::{self, Write};

/// The look of a shape or a text: a class of the style sheet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Style {
    /// An outline without a fill.
    Frame,
    /// The background of a group.
    Panel,
    /// The memory of a well-behaved pod.
    Calm,
    /// The memory of another well-behaved pod.
    Other,
    /// The memory of a pod that allocates without end.
    Greedy,
    /// A failure.
    Failed,
    /// A baseline to compare with.
    Base,
    /// A heading.
    Title,
    /// Ordinary text.
    Text,
    /// A remark.
    Faint,
    /// The output of a program.
    Output,
}

impl fmt::Display for Style {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Frame => "frame",
            Self::Panel => "panel",
            Self::Calm => "calm",
            Self::Other => "other",
            Self::Greedy => "greedy",
            Self::Failed => "failed",
            Self::Base => "base",
            Self::Title => "title",
            Self::Text => "text",
            Self::Faint => "faint",
            Self::Output => "output",
        })
    }
}

const STYLE_SHEET: &str = "\
text{font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px;fill:#1f2328}\
.output{font-family:ui-monospace,monospace;font-size:12px;white-space:pre}\
.title{font-size:15px;font-weight:600}.faint{fill:#59636e;font-size:12px}\
.frame{fill:none;stroke:#59636e}.panel{fill:#f6f8fa;stroke:#d1d9e0}\
.calm{fill:#54aeff}.other{fill:#4ac26b}.greedy{fill:#d4a72c}.failed{fill:#ff8182}.base{fill:#afb8c1}\
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.faint{fill:#9198a1}.frame{stroke:#9198a1}\
.panel{fill:#151b23;stroke:#3d444d}.calm{fill:#1f6feb}.other{fill:#238636}.greedy{fill:#9e6a03}\
.failed{fill:#da3633}.base{fill:#656c76}}";

/// A document under construction. Lengths are in pixels, and the origin is at the top left.
#[derive(Debug)]
pub(super) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self {
            width,
            height,
            body: String::new(),
        }
    }

    pub(super) fn rect(&mut self, style: Style, (x, y): (f64, f64), (width, height): (f64, f64)) {
        self.line(format_args!(
            r#"<rect class="{style}" x="{x}" y="{y}" width="{width:.1}" height="{height:.1}" rx="3"/>"#
        ));
    }

    pub(super) fn text(&mut self, style: Style, (x, y): (f64, f64), text: &str) {
        let text = escape(text);
        self.line(format_args!(
            r#"<text class="{style}" x="{x:.1}" y="{y:.1}">{text}</text>"#
        ));
    }

    /// Draws an arrow to the right.
    pub(super) fn arrow(&mut self, (x, y): (f64, f64), length: f64) {
        let (tip, head) = (x + length, x + length - 6.0);
        let (above, below) = (y - 4.0, y + 4.0);
        self.line(format_args!(
            r#"<path class="frame" d="M{x} {y}H{tip}M{head} {above}L{tip} {y}L{head} {below}"/>"#
        ));
    }

    /// Returns the document, with `title` for readers that cannot see it.
    pub(super) fn finish(self, title: &str) -> String {
        let Self {
            width,
            height,
            body,
        } = self;
        let title = escape(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\">\n<title>{title}</title>\n\
             <style>{STYLE_SHEET}</style>\n{body}</svg>\n"
        )
    }

    fn line(&mut self, element: fmt::Arguments<'_>) {
        writeln!(self.body, "{element}").expect("a String accepts every write");
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::{Style, Svg};

    #[test]
    fn text_is_escaped() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text(Style::Text, (0.0, 0.0), "a < b & c");
        let document = svg.finish("x > y");
        assert!(document.contains("a &lt; b &amp; c") && document.contains("x &gt; y"));
    }
}
