//! Checks what users see of Bursar besides its API: metrics, alerts, dashboards and runbooks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::checks::succeed;
use super::named::{self, TestSelection};
use crate::kube;
use crate::paths;
use crate::progress::Progress;
use crate::tools;

/// Monitoring files of the chart.
fn monitoring() -> PathBuf {
    paths::repository().join("charts/bursar/files/monitoring")
}

/// Runs promtool over the names, types and help texts of all metrics.
pub(super) fn metrics() -> anyhow::Result<()> {
    let tests = TestSelection::of_ignored(
        &["--lib"],
        [
            "metrics::tests::names_and_types_pass_promtool",
            "serve::metrics::tests::names_and_types_pass_promtool",
        ],
    );
    named::run_with_programs(&tests, &[("BURSAR_PROMTOOL", tools::promtool()?)])
}

/// Pods as Argo CD gives them to a script, each with the health that it must have.
const POD_HEALTH: &[(&str, &str)] = &[
    (
        r#"{ spec = { restartPolicy = "Always" }, status = { phase = "Pending",
            containerStatuses = { { state = { waiting = { reason = "RunContainerError",
            message = "rpc error: code = ResourceExhausted desc = waiting for 8 GiB" } } } } } }"#,
        "Progressing",
    ),
    (
        r#"{ spec = { restartPolicy = "Always" }, status = { phase = "Pending",
            containerStatuses = { { state = { waiting = { reason = "RunContainerError",
            message = "no such file" } } } } } }"#,
        "Degraded",
    ),
    (
        r#"{ spec = { restartPolicy = "Always" }, status = { phase = "Pending" } }"#,
        "Progressing",
    ),
    (
        r#"{ spec = { restartPolicy = "Always" }, status = { phase = "Running",
            conditions = { { type = "Ready", status = "True" } } } }"#,
        "Healthy",
    ),
    (
        r#"{ spec = { restartPolicy = "Always" }, status = { phase = "Running",
            containerStatuses = { { lastState = { terminated = {} } } } } }"#,
        "Degraded",
    ),
    (
        r#"{ spec = { restartPolicy = "Never" }, status = { phase = "Running" } }"#,
        "Progressing",
    ),
    (
        r#"{ spec = { restartPolicy = "Never" }, status = { phase = "Failed" } }"#,
        "Degraded",
    ),
];

/// Runs the health script of pods that the guide has for Argo CD, and promtool over its rule.
pub(super) fn gitops() -> anyhow::Result<()> {
    let guide = fs::read_to_string(paths::repository().join("docs/use/guides/gitops.md"))?;
    let blocks = guide.split("```yaml\n").skip(1);
    let blocks = blocks.filter_map(|block| Some(block.split_once("```")?.0));
    let mut scripts = BTreeMap::new();
    let folder = tempfile::tempdir()?;
    for block in blocks {
        let Value::Object(block_fields) = serde_yaml_ng::from_str(block)? else {
            continue;
        };
        if block_fields.contains_key("groups") {
            let rules = folder.path().join("rules.yaml");
            fs::write(&rules, block)?;
            succeed(
                Command::new(tools::promtool()?)
                    .args(["check", "rules"])
                    .arg(rules),
            )?;
        }
        let data = block_fields.get("data").and_then(Value::as_object).cloned();
        scripts.extend(data.into_iter().flatten());
    }
    let script = scripts.get("resource.customizations.health.Pod");
    let script = script.and_then(Value::as_str);
    let script = script.ok_or_else(|| anyhow::anyhow!("the guide has no script of pods"))?;
    for (pod, health) in POD_HEALTH {
        let check = format!(
            "obj = {pod}\nlocal found = (function()\n{script}\nend)().status\n\
             assert(found == \"{health}\", found)"
        );
        succeed(Command::new(tools::lua()?).args(["-e", &check]))?;
    }
    Ok(())
}

/// Runs promtool over the alerts and their tests, and renders them with the chart.
pub(super) fn alerts() -> anyhow::Result<()> {
    let promtool = tools::promtool()?;
    let repository = paths::repository();
    let alerts = monitoring().join("alerts.yaml");
    succeed(
        Command::new(&promtool)
            .args(["check", "rules"])
            .arg(&alerts),
    )?;
    let tests = repository.join("e2e/monitoring/alerts_test.yaml");
    succeed(Command::new(&promtool).args(["test", "rules"]).arg(&tests))?;
    let (alerts, tests) = (fs::read_to_string(alerts)?, fs::read_to_string(tests)?);
    for alert in alert_names(&alerts) {
        for history in ["fires", "is silent"] {
            let name = format!("- name: {alert} {history}\n");
            anyhow::ensure!(
                tests.contains(&name),
                "no test shows that {alert} {history}"
            );
        }
    }
    let toolbox = kube::build(&Progress::start())?;
    let rendered = Command::new(toolbox.program("helm"))
        .arg("template")
        .arg(repository.join("charts/bursar"))
        .args(["--namespace", "bursar-system", crate::chart::ANY_REGISTRY])
        .args(["--set", "monitoring.podMonitor.enabled=true"])
        .args(["--set", "monitoring.prometheusRule.enabled=true"])
        .args(["--set", "monitoring.dashboards.enabled=true"])
        .args(["--show-only", "templates/monitoring.yaml"])
        .output()?;
    let objects = String::from_utf8_lossy(&rendered.stdout);
    for (text, count) in [
        ("kind: PodMonitor", 2),
        ("honorLabels: true", 2),
        ("kind: PrometheusRule", 1),
        ("grafana_dashboard:", 2),
        ("runbook_url: https://", alert_names(&alerts).count()),
    ] {
        let found = objects.matches(text).count();
        anyhow::ensure!(
            found == count,
            "the chart renders `{text}` {found} times, and not {count} times"
        );
    }
    Ok(())
}

/// The queries of all dashboards and guides, each as a recording rule of the metric `query:NUMBER`.
#[derive(Debug)]
pub struct DashboardQueries(Vec<String>);

impl DashboardQueries {
    /// Reads the queries of the guides, and those of the chart's dashboards, with `.*` in the place
    /// of their variables.
    ///
    /// # Errors
    /// When a guide or a dashboard cannot be read or parsed.
    pub fn read() -> anyhow::Result<Self> {
        let mut queries = Vec::new();
        for entry in fs::read_dir(monitoring().join("dashboards"))? {
            let dashboard: Value = serde_json::from_slice(&fs::read(entry?.path())?)?;
            queries.extend(dashboard_queries(&dashboard));
        }
        let guides = paths::repository().join("docs/use/guides");
        for entry in fs::read_dir(guides)? {
            queries.extend(guide_queries(&fs::read_to_string(entry?.path())?));
        }
        // Both dashboards have some of the panels.
        queries.sort_unstable();
        queries.dedup();
        anyhow::ensure!(queries.len() > 30, "only {} queries", queries.len());
        Ok(Self(queries))
    }

    /// Returns the queries with the metrics of their rules.
    pub fn by_record(&self) -> impl Iterator<Item = (String, &str)> {
        let numbered = self.0.iter().enumerate();
        numbered.map(|(number, query)| (format!("query:{number}"), query.as_str()))
    }

    /// Returns the content of a rule file.
    pub fn rules(&self) -> Value {
        let rule = |(record, query)| serde_json::json!({ "record": record, "expr": query });
        let rules: Vec<Value> = self.by_record().map(rule).collect();
        serde_json::json!({ "groups": [{ "name": "dashboards", "rules": rules }] })
    }
}

/// The blocks of a guide in the query language.
fn guide_queries(guide: &str) -> Vec<String> {
    let blocks = guide.split("```promql\n").skip(1);
    let queries = blocks.filter_map(|block| block.split("```").next());
    let on_one_line = |query: &str| query.split_whitespace().collect::<Vec<_>>().join(" ");
    queries.map(on_one_line).collect()
}

/// Parses every query of the dashboards and guides with promtool, and looks up the metrics that the
/// queries and alerts name in `docs/use/reference/metrics.md`.
pub(super) fn queries() -> anyhow::Result<()> {
    let promtool = tools::promtool()?;
    let queries = DashboardQueries::read()?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("queries.json");
    fs::write(&file, queries.rules().to_string())?;
    succeed(Command::new(&promtool).args(["check", "rules"]).arg(&file))?;
    let alerts = fs::read_to_string(monitoring().join("alerts.yaml"))?;
    let documented = fs::read_to_string(paths::repository().join("docs/use/reference/metrics.md"))?;
    let documented = documented_metrics(&documented);
    let mut named: BTreeSet<&str> = queries
        .by_record()
        .flat_map(|(_, query)| metric_names(query))
        .collect();
    let rules: Value = serde_yaml_ng::from_str(&alerts)?;
    named.extend(alert_expressions(&rules).flat_map(metric_names));
    let unknown: Vec<_> = named
        .iter()
        .filter(|name| !documented.contains(series_family(name)))
        .collect();
    anyhow::ensure!(
        unknown.is_empty(),
        "docs/use/reference/metrics.md has no metric {unknown:?}"
    );
    println!("{} queries, {} metrics", queries.0.len(), named.len());
    Ok(())
}

/// Compares the headings of the runbooks with the alerts, conditions and Events of the code.
pub(super) fn runbooks() -> anyhow::Result<()> {
    let repository = paths::repository();
    let read = |path: &str| fs::read_to_string(repository.join(path));
    let runbooks = read("docs/use/runbooks.md")?;
    let alerts = fs::read_to_string(monitoring().join("alerts.yaml"))?;
    let conditions = read("crds/src/conditions.rs")?;
    let events = read("device-plugin/apiserver/src/events/reason.rs")?;
    let headings: BTreeSet<&str> = runbooks
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .collect();
    let events: Vec<&str> = quoted_after(&events, "=> (\"").collect();
    anyhow::ensure!(!events.is_empty(), "found no reason of an Event");
    let mut missing: Vec<&str> = alert_names(&alerts)
        .chain(events)
        .filter(|name| !headings.contains(name))
        .collect();
    let words = quoted_after(&conditions, ": &str = \"");
    missing.extend(words.filter(|word| {
        let is_heading = headings
            .iter()
            .any(|heading| heading.split(' ').next() == Some(word));
        !is_heading && !runbooks.contains(&format!("`{word}`"))
    }));
    anyhow::ensure!(
        missing.is_empty(),
        "docs/use/runbooks.md has no section or reason {missing:?}"
    );
    println!("{} sections", headings.len());
    Ok(())
}

fn alert_names(alerts: &str) -> impl Iterator<Item = &str> {
    let lines = alerts.lines();
    lines.filter_map(|line| line.trim_start().strip_prefix("- alert: "))
}

/// The queries of the alerts in a rule file.
fn alert_expressions(rules: &Value) -> impl Iterator<Item = &str> {
    let groups = rules["groups"].as_array().into_iter().flatten();
    let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
    rules.filter_map(|rule| rule["expr"].as_str())
}

/// The texts between `start` and the next quotation mark.
fn quoted_after<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    let parts = text.split(start).skip(1);
    parts.filter_map(|rest| rest.split('"').next())
}

/// The queries of a dashboard's panels, with `.*` for the variables.
fn dashboard_queries(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.filter_map(|target| target["expr"].as_str());
    let variables = ["$namespace", "$node"];
    queries
        .map(|query| {
            variables
                .iter()
                .fold(query.to_owned(), |query, name| query.replace(name, ".*"))
        })
        .collect()
}

/// The metrics of Bursar that a query names.
fn metric_names(query: &str) -> impl Iterator<Item = &str> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("bursar_"))
}

/// The metric of a series of a histogram.
fn series_family(name: &str) -> &str {
    let suffixes = ["_bucket", "_count", "_sum"];
    let family = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
    family.unwrap_or(name)
}

fn documented_metrics(page: &str) -> BTreeSet<&str> {
    let rows = page.lines();
    rows.filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_of_a_dashboard_have_no_variables_left() {
        let dashboard = serde_json::json!({ "panels": [
            { "type": "row" },
            { "targets": [{ "expr": "a{node=~\"$node\"}" }, { "expr": "b" }] },
        ]});
        assert_eq!(dashboard_queries(&dashboard), ["a{node=~\".*\"}", "b"]);
    }

    #[test]
    fn queries_of_a_guide_are_its_blocks() {
        let guide =
            "1. Read\n\n   ```promql\n   sum(\n     a\n   )\n   ```\n\n```yaml\nb: c\n```\n";
        assert_eq!(guide_queries(guide), ["sum( a )"]);
    }

    #[test]
    fn metric_names_are_words_of_the_query() {
        let query = "sum by (le) (rate(bursar_a_seconds_bucket{x=\"y\"}[5m])) / bursar_b";
        let names: Vec<_> = metric_names(query).map(series_family).collect();
        assert_eq!(names, ["bursar_a_seconds", "bursar_b"]);
    }

    #[test]
    fn alert_expressions_are_found_on_one_line_and_on_several() {
        let alerts = "groups:\n- rules:\n  - alert: A\n    expr: a > 0\n  - expr: >-\n      b\n";
        let rules: Value = serde_yaml_ng::from_str(alerts).unwrap();
        assert_eq!(
            alert_expressions(&rules).collect::<Vec<_>>(),
            ["a > 0", "b"]
        );
    }

    #[test]
    fn alert_names_and_quoted_texts_are_found() {
        let alerts = "  - alert: A\n    expr: x\n  - alert: B\n";
        assert_eq!(alert_names(alerts).collect::<Vec<_>>(), ["A", "B"]);
        let code = "Self::Bound => \"GpuBound\",\n pub const OK: &str = \"Ok\";";
        assert_eq!(
            quoted_after(code, "=> \"").collect::<Vec<_>>(),
            ["GpuBound"]
        );
    }
}
