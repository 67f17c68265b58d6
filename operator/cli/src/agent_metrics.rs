//! Parses the metrics of an agent that the commands show.

use std::collections::BTreeMap;

/// The most bytes of an agent's response that are read.
pub const MAX_BYTES: usize = 16 << 20;

/// The container of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerKey {
    /// The namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
}

/// The metrics of one container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerMetrics {
    /// Bytes by account (a GPU's UUID or `managed`) and amount: `quota`, `used`, `peak`, or the
    /// part of a charge, such as `leased`.
    pub memory: BTreeMap<(String, String), u64>,
    /// Denied allocations by driver function.
    pub denied: BTreeMap<String, u64>,
    /// The process generation.
    pub generation: Option<u64>,
    /// Whether the quota is enforced, with the reason if it is not.
    pub enforced: Option<Result<(), String>>,
    /// The layers that enforce the quota.
    pub layers: Vec<String>,
}

/// The metrics of one agent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentMetrics {
    /// The agent's version.
    pub version: Option<String>,
    /// The containers.
    pub containers: BTreeMap<ContainerKey, ContainerMetrics>,
    /// The number and the bytes of leases of retained memory, by GPU.
    pub retained: BTreeMap<String, (u64, u64)>,
}

impl ContainerMetrics {
    /// The sum of an amount over all GPUs.
    pub fn device(&self, amount: &str) -> Option<u64> {
        let of_gpus = self.memory.iter();
        let mut of_gpus = of_gpus
            .filter(|((account, name), _)| account != "managed" && name == amount)
            .map(|(_, bytes)| *bytes)
            .peekable();
        of_gpus.peek()?;
        Some(of_gpus.sum())
    }

    /// The GPUs that the container is bound to.
    pub fn gpus(&self) -> Vec<&str> {
        let accounts = self.memory.keys().map(|(account, _)| account.as_str());
        let mut gpus: Vec<&str> = accounts.filter(|account| *account != "managed").collect();
        gpus.dedup();
        gpus
    }

    /// All denied allocations.
    pub fn denials(&self) -> u64 {
        self.denied.values().sum()
    }
}

impl AgentMetrics {
    /// Parses a response in the OpenMetrics text format. Lines of other metrics are skipped.
    pub fn parse(text: &str) -> Self {
        let mut metrics = Self::default();
        for line in text.lines().filter(|line| line.starts_with("bursar_")) {
            if let Some((name, labels, value)) = sample(line) {
                metrics.record(name, &labels, value);
            }
        }
        metrics
    }

    fn record(&mut self, name: &str, labels: &BTreeMap<&str, String>, value: f64) {
        let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
        let count = value.max(0.0) as u64;
        match name {
            "bursar_agent_build_info" => self.version = Some(label("version")),
            "bursar_gpu_retained_leases" => {
                self.retained.entry(label("gpu")).or_default().0 = count
            }
            "bursar_gpu_retained_bytes" => self.retained.entry(label("gpu")).or_default().1 = count,
            _ if name.starts_with("bursar_container_") => {
                let key = ContainerKey {
                    namespace: label("namespace"),
                    pod: label("pod"),
                    container: label("container"),
                };
                let container = self.containers.entry(key).or_default();
                let mut memory = |amount: &str| {
                    let at = (label("account"), amount.to_owned());
                    container.memory.insert(at, count);
                };
                match name {
                    "bursar_container_memory_quota_bytes" => memory("quota"),
                    "bursar_container_memory_used_bytes" => memory("used"),
                    "bursar_container_memory_peak_bytes" => memory("peak"),
                    "bursar_container_memory_charged_bytes" => memory(&label("part")),
                    "bursar_container_denied_total" => {
                        container.denied.insert(label("function"), count);
                    }
                    "bursar_container_generation" => container.generation = Some(count),
                    "bursar_container_enforced" => {
                        let gap = (count == 0).then(|| label("reason"));
                        container.enforced = Some(gap.map_or(Ok(()), Err));
                    }
                    "bursar_container_layer" if count == 1 => container.layers.push(label("layer")),
                    _ => {}
                }
            }
            _ => {}
        }
    }
}

/// Splits a sample into name, labels and value.
fn sample(line: &str) -> Option<(&str, BTreeMap<&str, String>, f64)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(after) = rest.strip_prefix('{') {
        rest = after;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(label, value);
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

/// Reads a label's value up to its closing quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_a_container_are_gathered() {
        let metrics = AgentMetrics::parse(
            "# TYPE bursar_agent_build info\n\
             bursar_agent_build_info{version=\"0.1.0\"} 1\n\
             bursar_container_memory_used_bytes{namespace=\"ml\",pod=\"a\",container=\"c\",account=\"GPU-1\"} 3\n\
             bursar_container_memory_used_bytes{namespace=\"ml\",pod=\"a\",container=\"c\",account=\"GPU-2\"} 4\n\
             bursar_container_memory_used_bytes{namespace=\"ml\",pod=\"a\",container=\"c\",account=\"managed\"} 50\n\
             bursar_container_denied_total{namespace=\"ml\",pod=\"a\",container=\"c\",function=\"cuMemAlloc_v2\"} 2\n\
             bursar_container_enforced{namespace=\"ml\",pod=\"a\",container=\"c\",reason=\"Privileged\"} 0\n\
             bursar_container_layer{namespace=\"ml\",pod=\"a\",container=\"c\",layer=\"audit\"} 1\n\
             bursar_gpu_retained_leases{gpu=\"GPU-1\"} 2\n\
             bursar_gpu_retained_bytes{gpu=\"GPU-1\"} 1e9\n# EOF\n",
        );
        assert_eq!(metrics.version.as_deref(), Some("0.1.0"));
        let container = metrics.containers.values().next().unwrap();
        assert_eq!(container.device("used"), Some(7));
        assert_eq!(container.device("peak"), None);
        assert_eq!(container.gpus(), ["GPU-1", "GPU-2"]);
        assert_eq!(container.denials(), 2);
        assert_eq!(container.enforced, Some(Err("Privileged".to_owned())));
        assert_eq!(container.layers, ["audit"]);
        assert_eq!(metrics.retained["GPU-1"], (2, 1_000_000_000));
    }

    #[test]
    fn malformed_lines_are_skipped() {
        let text = "bursar_container_generation{pod=\"a\nbursar_x\nbursar_y{} z\nbursar_agent_build_info{version=\"a\\\"b\"} 1";
        let metrics = AgentMetrics::parse(text);
        assert_eq!(metrics.version.as_deref(), Some("a\"b"));
        assert!(metrics.containers.is_empty());
    }
}
