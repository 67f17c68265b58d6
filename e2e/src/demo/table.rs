//! Renders the demo's table.

use super::probe_output::{ProbeOutput, format_gib};
use super::workloads::Workload;

/// One pod's row.
#[derive(Debug, Clone)]
pub(super) struct Row {
    node: String,
    gpu: String,
    pod: String,
    quota: String,
    sees: String,
    took: String,
    pub(super) note: String,
}

impl Row {
    pub(super) fn new(workload: &Workload, node: &str, output: &ProbeOutput) -> Self {
        let refusal = output
            .refused
            .as_ref()
            .map(|refused| format!("wanted more: {}", refused.name));
        Self {
            node: node.to_owned(),
            gpu: output.device.uuid.clone(),
            pod: format!("{}/{}", workload.namespace, workload.name),
            quota: format!("{} GiB", workload.gib),
            sees: format!(
                "{} GiB, {} free",
                format_gib(output.device.total),
                format_gib(output.device.free)
            ),
            took: format!("{} GiB", format_gib(output.got)),
            note: refusal.unwrap_or_default(),
        }
    }

    fn cells(&self) -> [&str; 7] {
        [
            &self.node,
            &self.gpu,
            &self.pod,
            &self.quota,
            &self.sees,
            &self.took,
            &self.note,
        ]
    }
}

const HEAD: [&str; 7] = [
    "NODE",
    "GPU",
    "POD",
    "QUOTA",
    "SEES (cuMemGetInfo)",
    "TOOK",
    "WHAT IT WAS TOLD",
];

pub(super) fn render(rows: &[Row]) -> String {
    let lines: Vec<[&str; 7]> = std::iter::once(HEAD)
        .chain(rows.iter().map(Row::cells))
        .collect();
    let width = |column: usize| {
        lines
            .iter()
            .map(|line| line[column].len())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells = line
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}
