//! Rewrites metrics in the OpenMetrics text format as the Prometheus text format 0.0.4.
//!
//! Scrapers that do not accept OpenMetrics, and `promtool check metrics`, read the older format.
//! A counter or info of the older format has the name of its samples. The older format has no type
//! `info`, no units and no end mark.

/// The content type of OpenMetrics.
pub(crate) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The content type of the Prometheus text format.
pub(crate) const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns `open_metrics` in the Prometheus text format.
pub fn prometheus_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    // OpenMetrics has a family's help before its type.
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = type_of(line) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            if let Some((_, help)) = help.take().filter(|(named, _)| *named == name) {
                text.push_str(&format!("# HELP {name}{suffix} {help}\n"));
            }
            text.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

fn type_of(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("# TYPE ")?.split_once(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_the_names_of_their_samples() {
        let open = "# HELP a_build Version.\n# TYPE a_build info\na_build_info{version=\"1\"} 1\n\
            # HELP a_writes Writes.\n# TYPE a_writes counter\na_writes_total{result=\"ok\"} 2\n\
            # HELP a_age_seconds Age.\n# TYPE a_age_seconds gauge\n# UNIT a_age_seconds seconds\n\
            a_age_seconds 0.5\n# EOF\n";
        let plain = "# HELP a_build_info Version.\n# TYPE a_build_info gauge\n\
            a_build_info{version=\"1\"} 1\n\
            # HELP a_writes_total Writes.\n# TYPE a_writes_total counter\n\
            a_writes_total{result=\"ok\"} 2\n\
            # HELP a_age_seconds Age.\n# TYPE a_age_seconds gauge\na_age_seconds 0.5\n";
        assert_eq!(prometheus_text(open), plain);
    }

    #[test]
    fn samples_keep_their_labels_whatever_these_contain() {
        let open = "# TYPE a gauge\na{b=\"# TYPE x info\"} 1\n# EOF\n";
        assert_eq!(
            prometheus_text(open),
            "# TYPE a gauge\na{b=\"# TYPE x info\"} 1\n"
        );
    }
}
