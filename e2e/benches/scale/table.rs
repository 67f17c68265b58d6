//! Renders the measurements of each size, and their projection to five times the largest.

use crate::fleet::Size;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    /// A straight line through the measurements, over the number of nodes.
    Linear,
    /// No projection.
    NotProjected,
}

/// The value of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measurement {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    pub(crate) projected: Projection,
}

/// The ratio of the projected cluster to the largest measured one.
const PROJECTION_FACTOR: usize = 5;

/// Renders a table in Markdown. All sizes have the same rows.
pub(crate) fn table(sizes: &[(Size, Vec<Measurement>)]) -> String {
    let Some((largest, rows)) = sizes.last() else {
        return String::new();
    };
    let far = Size {
        nodes: largest.nodes * PROJECTION_FACTOR,
        pods: largest.pods * PROJECTION_FACTOR,
        budgets: largest.budgets * PROJECTION_FACTOR,
    };
    let title = |size: &Size| format!(" {}/{}/{} |", size.nodes, size.pods, size.budgets);
    let titles: String = sizes.iter().map(|(size, _)| title(size)).collect();
    let mut text = format!("| nodes/pods/budgets |{titles} projected:{}\n", title(&far));
    text += &format!("|---|{}---|\n", "---|".repeat(sizes.len()));
    for (at, row) in rows.iter().enumerate() {
        let points: Vec<(f64, f64)> = sizes
            .iter()
            .filter_map(|(size, rows)| Some((size.nodes as f64, rows.get(at)?.value)))
            .collect();
        let values: String = points.iter().map(|(_, value)| cell(*value)).collect();
        let projected = match row.projected {
            Projection::Linear => extrapolate(&points, far.nodes as f64).map(cell),
            Projection::NotProjected => None,
        };
        let projected = projected.unwrap_or_else(|| " |".to_owned());
        text += &format!("| {} |{values}{projected}\n", row.name);
    }
    text
}

fn cell(value: f64) -> String {
    if value == 0.0 || value >= 100.0 {
        format!(" {value:.0} |")
    } else if value >= 10.0 {
        format!(" {value:.1} |")
    } else {
        format!(" {value:.2} |")
    }
}

/// Returns the value at `x` of the least-squares line through `points`, which needs two points.
fn extrapolate(points: &[(f64, f64)], x: f64) -> Option<f64> {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (mean_x, mean_y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let together = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y));
    let slope = together.sum::<f64>() / spread;
    (points.len() > 1).then_some(mean_y + slope * (x - mean_x))
}
