//! Makes the table of Events that agents and operator have published.

use serde_json::{Value, json};

use crate::amounts::since;
use crate::objects::Event;
use crate::snapshot::Snapshot;
use crate::table::{Cell, Style, Table, Terminal, column, expendable};

/// The Events of the last `seconds`, the newest last. Events on nodes are of all namespaces.
pub fn shown(snapshot: &Snapshot, seconds: Option<i64>) -> Vec<&Event> {
    let now = snapshot.now.as_second();
    let is_recent = |event: &&Event| {
        let age = event
            .time()
            .map(|time| now.saturating_sub(time.as_second()));
        seconds.is_none_or(|most| age.is_some_and(|age| age <= most))
    };
    snapshot.events.iter().filter(is_recent).collect()
}

fn node(event: &Event) -> &str {
    match event.involved_object.kind.as_str() {
        "Node" | "GpuNode" => &event.involved_object.name,
        _ if event.reporting_component == "bursar-agent" => &event.reporting_instance,
        _ => "",
    }
}

/// The table of Events.
pub fn render(snapshot: &Snapshot, seconds: Option<i64>, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("AGE"),
        expendable("NODE", 1),
        expendable("NAMESPACE", 2),
        column("OBJECT"),
        column("REASON"),
        column("WHAT"),
    ]);
    for event in shown(snapshot, seconds) {
        let age = event
            .time()
            .map_or_else(|| "-".to_owned(), |time| since(time, snapshot.now));
        let kind = event.involved_object.kind.to_lowercase();
        let namespace = match event.involved_object.namespace.as_str() {
            "" => "-",
            namespace => namespace,
        };
        let node = match node(event) {
            "" => "-",
            node => node,
        };
        let style = if event.type_ == "Warning" {
            Style::Warning
        } else {
            Style::Plain
        };
        let times = match event.occurrences() {
            1 => String::new(),
            times => format!(" ({times} times)"),
        };
        table.push(vec![
            age.into(),
            node.into(),
            namespace.into(),
            format!("{kind}/{}", event.involved_object.name).into(),
            Cell::new(event.reason.as_str(), style),
            format!("{}{times}", event.message).into(),
        ]);
    }
    let mut text = table.render(terminal);
    if table.is_empty() && !terminal.no_headers {
        text.push_str("No events of Bursar.\n");
    }
    text
}

/// The Events as a list.
pub fn json(snapshot: &Snapshot, seconds: Option<i64>) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "items": shown(snapshot, seconds) })
}
