//! Parses the line that the probe prints about its GPU.

use serde::Deserialize;

/// One line of `bursar-probe`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct ProbeOutput {
    /// The bytes that the probe has allocated.
    #[serde(default)]
    pub(super) got: u64,
    /// The CUDA error of the allocation that the shim refused.
    pub(super) refused: Option<Refused>,
    pub(super) device: Device,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Refused {
    pub(super) name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Device {
    pub(super) uuid: String,
    /// Free bytes by `cuMemGetInfo`.
    pub(super) free: u64,
    pub(super) total: u64,
}

impl ProbeOutput {
    pub(super) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// Summarizes what the program sees, takes and is refused.
    pub(super) fn summary(&self) -> String {
        let (sees, takes) = (format_gib(self.device.total), format_gib(self.got));
        match &self.refused {
            Some(refused) => format!("sees {sees} GiB, takes {takes}, then {}", refused.name),
            None => format!("sees {sees} GiB, takes {takes}"),
        }
    }
}

/// Formats bytes in GiB with at most two decimals.
pub(super) fn format_gib(bytes: u64) -> String {
    let text = format!("{:.2}", bytes as f64 / f64::from(1 << 30));
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_names_the_refusal_and_the_allocated_bytes() {
        let line = r#"{"event":"refused","got":10737418240,"asked":1,"refused":{"code":2,"name":"CUDA_ERROR_OUT_OF_MEMORY"},
            "device":{"uuid":"GPU-1","name":"x","ordinal":0,"free":0,"total":10737418240,"total_mem":10737418240}}"#;
        let output = ProbeOutput::parse(line).unwrap();
        assert_eq!(
            output.summary(),
            "sees 10 GiB, takes 10, then CUDA_ERROR_OUT_OF_MEMORY"
        );
        assert_eq!(ProbeOutput::parse("no JSON"), None);
    }

    #[test]
    fn format_gib_omits_trailing_zeros() {
        assert_eq!(
            (format_gib(3 << 29).as_str(), format_gib(10 << 30).as_str()),
            ("1.5", "10")
        );
    }
}
