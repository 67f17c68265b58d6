//! Parses and validates the simulated machine's configuration file.

use serde::{Deserialize, Deserializer, de::Error as _};
use std::path::Path;

/// `config.toml`: the simulated machine. The parser refuses unknown fields and names them.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// The driver version that NVML reports.
    #[serde(default = "default_driver_version")]
    pub driver_version: String,
    /// The version that `cuDriverGetVersion` reports, such as `"13.0"`.
    ///
    /// Before 12.2, libcuda exports neither `cuMemAdvise_v2` nor `cuMemPrefetchAsync_v2`.
    #[serde(default = "default_cuda_version")]
    pub cuda_version: Version,
    /// GPU memory of a context, in bytes (F5 in docs/internals/facts.md: 518 MiB on an H200).
    #[serde(default = "default_context", deserialize_with = "quantity")]
    pub context: u64,
    /// GPU memory, in bytes, that a process without a context uses once it creates memory (F3 in
    /// docs/internals/facts.md: 4 MiB).
    #[serde(default = "default_client", deserialize_with = "quantity")]
    pub client: u64,
    /// Whether the driver zeroes freed memory before it allocates it again (F6 in
    /// docs/internals/facts.md).
    ///
    /// `simgpu scrub` changes the setting at run time.
    #[serde(default = "yes")]
    pub scrub: bool,
    /// Whether other memory displaces managed memory (`uvm_global_oversubscription` of the driver's
    /// kernel module).
    #[serde(default = "yes")]
    pub uvm_oversubscription: bool,
    /// The chunks of 2 MiB that the module takes for the first managed memory on a GPU.
    #[serde(default = "default_uvm_batch")]
    pub uvm_batch: u64,
    /// The milliseconds that the eviction of a GiB of managed memory takes.
    ///
    /// `simgpu uvm delay` changes the setting at run time.
    #[serde(default)]
    pub uvm_delay: u32,
    /// The bytes of a process's managed memory that can be evicted. For lack of host memory for
    /// more, the kernel kills the process, and the driver refuses the allocation.
    ///
    /// `simgpu uvm host-room` changes the setting of a running process.
    #[serde(default = "no_limit", deserialize_with = "quantity")]
    pub uvm_host_room: u64,
    /// Whether devices access all host memory (HMM; not `uvm_disable_hmm` of the driver's kernel
    /// module). What they access moves to them, as managed memory does.
    #[serde(default)]
    pub pageable_memory: bool,
    /// Whether NVML supports utilization samples of processes.
    #[serde(default = "yes")]
    pub process_utilization: bool,
    /// The GPUs, in the order in which CUDA and NVML list them.
    #[serde(default)]
    pub gpu: Vec<Gpu>,
}

/// One `[[gpu]]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Gpu {
    /// The marketing name, such as `"NVIDIA H200"`.
    pub name: String,
    /// `GPU-` and 32 hex digits in the usual five groups.
    pub uuid: String,
    /// The GPU's memory, such as `"16Gi"`; programs can allocate every byte of it.
    #[serde(deserialize_with = "quantity")]
    pub memory: u64,
    /// The minor number of the device node, `/dev/nvidia<minor>`.
    pub minor: u32,
    /// The compute capability, such as `"9.0"`.
    #[serde(default = "default_capability")]
    pub compute_capability: Version,
    /// Streaming multiprocessors, with 2,048 threads each; they determine the memory of a stack
    /// (F14 in docs/internals/facts.md).
    #[serde(default = "default_multiprocessors")]
    pub multiprocessors: u32,
    /// Whether the GPU and the host can access managed memory at the same time. CUDA's device
    /// attribute alone says so: the simulated driver evicts managed memory all the same.
    #[serde(default = "yes")]
    pub concurrent_managed_access: bool,
    /// The PCI bus id, such as `"00000000:17:00.0"`; derived from the GPU's position when absent.
    pub pci: Option<String>,
    /// MIG instances. A GPU with at least one instance is in MIG mode.
    #[serde(default)]
    pub mig: Vec<Mig>,
}

/// One `[[gpu.mig]]`: a MIG device with its one compute instance.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Mig {
    /// The profile, such as `"1g.18gb"`.
    pub profile: String,
    /// `MIG-` and 32 hex digits in five groups.
    pub uuid: String,
    /// The instance's memory, such as `"16Gi"`.
    #[serde(deserialize_with = "quantity")]
    pub memory: u64,
}

/// A version of the form `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// The number before the dot.
    pub major: i32,
    /// The number after the dot.
    pub minor: i32,
}

/// Reasons why the configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not the TOML that this module describes.
    #[error("failed to parse {path}: {message}")]
    Parse {
        /// The file.
        path: String,
        /// The position and cause, with the field's name.
        message: String,
    },
    /// The values contradict each other.
    #[error("gpu[{gpu}].{field}: {why}")]
    Value {
        /// Position of the GPU, from 0.
        gpu: usize,
        /// The field.
        field: &'static str,
        /// The contradiction.
        why: String,
    },
}

impl Config {
    /// Reads and validates a file.
    ///
    /// # Errors
    /// The file is unreadable, is not TOML, has an unknown field, or its values contradict each
    /// other.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: shown.clone(),
            source,
        })?;
        Config::parse(&text).map_err(|error| match error {
            ConfigError::Parse { message, .. } => ConfigError::Parse {
                path: shown,
                message,
            },
            other => other,
        })
    }

    /// Parses and validates a file's text.
    ///
    /// # Errors
    /// Those of [`Config::read`], except for an unreadable file.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text).map_err(|error| ConfigError::Parse {
            path: "config".to_owned(),
            message: error.to_string(),
        })?;
        config.validate()?;
        Ok(config)
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let mut uuids = std::collections::BTreeSet::new();
        let mut minors = std::collections::BTreeSet::new();
        for (gpu, gpu_config) in self.gpu.iter().enumerate() {
            let bad = |field, why: String| Err(ConfigError::Value { gpu, field, why });
            if uuid_bytes(&gpu_config.uuid, "GPU-").is_none() || !uuids.insert(&gpu_config.uuid) {
                return bad(
                    "uuid",
                    format!("`{}` is not a GPU uuid, or is used twice", gpu_config.uuid),
                );
            }
            if !minors.insert(gpu_config.minor) {
                return bad("minor", format!("{} is used twice", gpu_config.minor));
            }
            for mig in &gpu_config.mig {
                if uuid_bytes(&mig.uuid, "MIG-").is_none() || !uuids.insert(&mig.uuid) {
                    return bad(
                        "mig.uuid",
                        format!("`{}` is not a MIG uuid, or is used twice", mig.uuid),
                    );
                }
            }
            if gpu_config
                .mig
                .iter()
                .map(|mig| u128::from(mig.memory))
                .sum::<u128>()
                > u128::from(gpu_config.memory)
            {
                return bad(
                    "mig.memory",
                    "the instances have more memory than the GPU".to_owned(),
                );
            }
        }
        let units = self
            .gpu
            .iter()
            .map(|gpu_config| 1 + gpu_config.mig.len())
            .sum::<usize>();
        if units > crate::table::MAX_UNITS {
            let why = format!(
                "{units} GPUs and instances; at most {}",
                crate::table::MAX_UNITS
            );
            return Err(ConfigError::Value {
                gpu: 0,
                field: "mig",
                why,
            });
        }
        Ok(())
    }
}

impl Gpu {
    /// The PCI bus id: the configured value, or a value derived from the GPU's position.
    pub fn bus_id(&self, position: usize) -> String {
        self.pci
            .clone()
            .unwrap_or_else(|| format!("00000000:{:02X}:00.0", 0x17 + position))
    }
}

/// Parses a UUID with the given prefix into its 16 bytes; `None` if the text is malformed.
pub fn uuid_bytes(text: &str, prefix: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = text.strip_prefix(prefix)?.split('-').collect();
    if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = groups.concat();
    u128::from_str_radix(&digits, 16)
        .ok()
        .map(u128::to_be_bytes)
}

/// Parses a quantity into bytes: a plain number, or a number with `Ki`, `Mi`, `Gi` or `Ti`.
pub fn parse_quantity(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        "Ti" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn quantity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_quantity(&text).ok_or_else(|| {
        D::Error::custom(format!(
            "`{text}` is not an amount of bytes such as \"16Gi\""
        ))
    })
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.split_once('.')
            .and_then(|(major, minor)| {
                Some(Version {
                    major: major.parse().ok()?,
                    minor: minor.parse().ok()?,
                })
            })
            .ok_or_else(|| D::Error::custom(format!("`{text}` is not a version such as \"13.0\"")))
    }
}

fn default_driver_version() -> String {
    "580.95.05".to_owned()
}
fn default_cuda_version() -> Version {
    Version {
        major: 13,
        minor: 0,
    }
}
fn default_capability() -> Version {
    Version { major: 9, minor: 0 }
}
fn default_context() -> u64 {
    518 << 20
}
fn default_client() -> u64 {
    4 << 20
}
fn default_uvm_batch() -> u64 {
    64
}
fn no_limit() -> u64 {
    u64::MAX
}
fn default_multiprocessors() -> u32 {
    132
}
fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU_CONFIG: &str = "[[gpu]]\nname = \"NVIDIA H200\"\nuuid = \"GPU-00000000-0000-0000-0000-000000000001\"\n\
                        memory = \"16Gi\"\nminor = 0\n";

    #[test]
    fn gpu_is_valid_when_only_required_fields_are_set() {
        let config = Config::parse(GPU_CONFIG).unwrap();
        assert_eq!(config.gpu[0].memory, 16 << 30);
        assert_eq!(config.context, 518 << 20);
        assert!(config.gpu[0].concurrent_managed_access);
        assert_eq!(
            config.cuda_version,
            Version {
                major: 13,
                minor: 0
            }
        );
    }

    #[test]
    fn config_names_field_when_it_is_unknown() {
        let error = Config::parse(&format!("{GPU_CONFIG}memroy = \"1Gi\"\n"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("memroy"), "{error}");
    }

    #[test]
    fn config_shows_amount_when_it_is_malformed() {
        let error = Config::parse(&GPU_CONFIG.replace("16Gi", "16GB"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("16GB") && error.contains("memory"),
            "{error}"
        );
    }

    #[test]
    fn config_is_refused_when_two_gpus_share_a_uuid() {
        let error = Config::parse(&format!(
            "{GPU_CONFIG}{}",
            GPU_CONFIG.replace("minor = 0", "minor = 1")
        ))
        .unwrap_err();
        assert!(error.to_string().starts_with("gpu[1].uuid"), "{error}");
    }

    #[test]
    fn config_is_refused_when_mig_exceeds_gpu_memory() {
        let mig = "[[gpu.mig]]\nprofile = \"7g.141gb\"\nuuid = \"MIG-00000000-0000-0000-0000-000000000002\"\nmemory = \"17Gi\"\n";
        let error = Config::parse(&format!("{GPU_CONFIG}{mig}")).unwrap_err();
        assert!(
            error.to_string().starts_with("gpu[0].mig.memory"),
            "{error}"
        );
    }
}
