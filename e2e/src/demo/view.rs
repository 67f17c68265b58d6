//! What a pod itself saw, from the line that the probe prints.

use serde::Deserialize;

/// A line of `bursar-probe`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct View {
    /// Bytes that it got.
    #[serde(default)]
    pub(super) got: u64,
    /// What it was told when it asked for more.
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
    /// `cuMemGetInfo`.
    pub(super) free: u64,
    pub(super) total: u64,
}

impl View {
    pub(super) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// What it saw, after "asked for 10 GiB and".
    pub(super) fn sentence(&self) -> String {
        let sees = format!("sees a GPU of {} GiB", gib(self.device.total));
        match &self.refused {
            Some(refused) => format!(
                "{sees}; took {} GiB, then was told {}",
                gib(self.got),
                refused.name
            ),
            None => format!("{sees}, of which it took {}", gib(self.got)),
        }
    }
}

/// GiB with as many digits as it needs, two at most.
pub(super) fn gib(bytes: u64) -> String {
    let text = format!("{:.2}", bytes as f64 / f64::from(1 << 30));
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_with_what_was_got() {
        let line = r#"{"event":"refused","got":10737418240,"asked":1,"refused":{"code":2,"name":"CUDA_ERROR_OUT_OF_MEMORY"},
            "device":{"uuid":"GPU-1","name":"x","ordinal":0,"free":0,"total":10737418240,"total_mem":10737418240}}"#;
        let view = View::parse(line).unwrap();
        assert_eq!(
            view.sentence(),
            "sees a GPU of 10 GiB; took 10 GiB, then was told CUDA_ERROR_OUT_OF_MEMORY"
        );
        assert_eq!(View::parse("no JSON"), None);
    }

    #[test]
    fn amounts_have_no_useless_digits() {
        assert_eq!(
            (gib(3 << 29).as_str(), gib(10 << 30).as_str()),
            ("1.5", "10")
        );
    }
}
