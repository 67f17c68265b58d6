//! Calls NVML about one GPU, or about the driver, in a process that the agent kills if a call
//! hangs.
//!
//! NVML holds each GPU of which it has made a handle until its process ends. It also opens each GPU
//! that it enumerates or compares with a UUID. So a process opens its GPU by the PCI address, as
//! soon as that is known.

mod describe;
mod sample;

use std::ffi::OsString;
use std::io::{self, BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bursar_ledger::units::{GpuUuid, UnitError};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::protocol::{CallError, GpuProbe, Request, Response, Scope};
use crate::NoDriver;
use crate::cgroup_limit::{self, is_unsupported};
use describe::{describe_instances, find_instance, pci_address};
use sample::{sample_memory, sm_percents};

/// The first argument with which the agent's program runs [`run_child`].
pub const SUBCOMMAND: &str = "nvml";

/// The process name that `ps` shows.
const PROCESS_NAME: &std::ffi::CStr = c"bursar-nvml";

/// Answers requests from standard input until the agent ends.
pub fn run_child(words: impl Iterator<Item = OsString>) -> ExitCode {
    // Neither call is needed: an agent that has ended closes the standard input too.
    let _ = rustix::thread::set_name(PROCESS_NAME);
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    match serve(words) {
        Some(()) => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    }
}

/// None where a request is malformed, or the agent has closed the pipe.
fn serve(mut words: impl Iterator<Item = OsString>) -> Option<()> {
    let library = PathBuf::from(words.next()?);
    let scope = serde_json::from_str(words.next()?.to_str()?).ok()?;
    let hidden: Vec<PathBuf> = words.map(PathBuf::from).collect();
    let hidden: Vec<&Path> = hidden.iter().map(PathBuf::as_path).collect();
    // The agent logs once which limits this kernel lacks. The node's GPUs are served without them.
    let _ = bursar_confine::restrict_nvml_process(&hidden, library.parent()?);
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init();
    let nvml = nvml.map_err(|error| driver_error(&library.display(), &error));
    let mut calls = NvmlCalls {
        nvml: nvml.as_ref(),
        scope,
        device: None,
        events: None,
        lacks_utilization: false,
    };
    let mut answers = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let request = serde_json::from_str(&line.ok()?).ok()?;
        let mut response = serde_json::to_vec(&calls.handle(request)).ok()?;
        response.push(b'\n');
        answers.write_all(&response).ok()?;
        answers.flush().ok()?;
    }
    Some(())
}

fn driver_error(asked: &dyn std::fmt::Display, error: &NvmlError) -> NoDriver {
    let why = format!("{asked}: {error}");
    match error {
        NvmlError::DriverNotLoaded => NoDriver::NotLoaded(why),
        _ => NoDriver::Failed(why),
    }
}

/// The library and the GPU that this process has opened.
struct NvmlCalls<'nvml> {
    nvml: Result<&'nvml Nvml, &'nvml NoDriver>,
    scope: Scope,
    device: Option<Device<'nvml>>,
    /// The GPU's events, once NVML has accepted the registration.
    events: Option<EventSet<'nvml>>,
    /// The driver has no utilization of processes, and is asked no more.
    lacks_utilization: bool,
}

/// Why NVML could not describe a GPU.
#[derive(Debug, thiserror::Error)]
enum GpuError {
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    #[error(transparent)]
    Unit(#[from] UnitError),
}

impl<'nvml> NvmlCalls<'nvml> {
    fn handle(&mut self, request: Request) -> Response {
        let nvml = match self.nvml {
            Ok(nvml) => nvml,
            Err(why) => return Response::NoDriver(why.clone()),
        };
        match request {
            Request::Probe if self.scope == Scope::Driver => probe_driver(nvml),
            Request::Probe => self.probe(nvml),
            Request::Xids => Response::Xids(self.pending_xids()),
            Request::Sample {
                gpu,
                with_utilization,
            } => {
                // NVML refuses the call for MIG instances.
                let wants_utilization =
                    with_utilization && !self.lacks_utilization && !gpu.is_mig();
                let mut is_unsupported_call = false;
                let sample = self.call(nvml, &gpu, |device| {
                    let mut sample = sample_memory(device, &gpu)?;
                    // An idle GPU costs no call.
                    if wants_utilization && !sample.charges.is_empty() {
                        match sm_percents(device, &sample.charges) {
                            Ok(percents) => sample.sm_percents = Some(percents),
                            Err(error) => is_unsupported_call = is_unsupported(&error),
                        }
                    }
                    Ok(sample)
                });
                self.lacks_utilization |= is_unsupported_call;
                Response::Sample(sample)
            }
            Request::Limit { gpu, cgroup, hard } => {
                let limit =
                    |device: &Device<'_>| cgroup_limit::memory_limit(nvml, device, &cgroup, hard);
                Response::Limit(self.call(nvml, &gpu, limit))
            }
        }
    }

    fn probe(&mut self, nvml: &'nvml Nvml) -> Response {
        let named = self.device(nvml).map_err(GpuError::Nvml);
        let uuid = match named.and_then(|device| Ok(device.uuid()?.parse()?)) {
            Ok(uuid) => uuid,
            Err(error) => {
                let found = failed_probe(&error);
                return Response::Gpu { uuid: None, found };
            }
        };
        let found = self.probe_gpu(nvml, &uuid);
        Response::Gpu {
            uuid: Some(uuid),
            found: found.unwrap_or_else(|error| failed_probe(&error)),
        }
    }

    /// Registers for XIDs before the probe, which may take long on a failing GPU.
    fn probe_gpu(&mut self, nvml: &'nvml Nvml, uuid: &GpuUuid) -> Result<GpuProbe, GpuError> {
        if self.events.is_none()
            && let (Ok(set), device) = (nvml.create_event_set(), self.device(nvml)?)
        {
            // A registration that fails destroys the set; the next probe tries again.
            let registered = device.register_events(EventTypes::CRITICAL_XID_ERROR, set);
            self.events = registered.ok();
        }
        let device = self.device(nvml)?;
        Ok(GpuProbe::Gpus(
            describe_instances(nvml, device, uuid)?,
            pci_address(device),
        ))
    }

    /// The GPU of the scope; its handle is made once.
    fn device(&mut self, nvml: &'nvml Nvml) -> Result<&Device<'nvml>, NvmlError> {
        let device = match (self.device.take(), self.scope) {
            (Some(device), _) => device,
            (None, Scope::Driver) => return Err(NvmlError::NotFound),
            (None, Scope::Index(index)) => nvml.device_by_index(index)?,
            (None, Scope::Address(address)) => nvml.device_by_pci_bus_id(address.to_string())?,
        };
        Ok(self.device.insert(device))
    }

    fn pending_xids(&self) -> Vec<u64> {
        let next = || self.events.as_ref()?.wait(0).ok();
        std::iter::from_fn(next)
            .filter_map(|event| match event.event_data {
                Some(XidError::Value(code)) => Some(code),
                _ => None,
            })
            .collect()
    }

    /// Calls NVML about the GPU, or about its MIG instance of that UUID.
    fn call<T>(
        &mut self,
        nvml: &'nvml Nvml,
        gpu: &GpuUuid,
        query: impl FnOnce(&Device<'_>) -> Result<T, NvmlError>,
    ) -> Result<T, CallError> {
        let physical = self.device(nvml);
        let answer = physical.and_then(|physical| match gpu.is_mig() {
            true => query(&find_instance(physical, gpu)?),
            false => query(physical),
        });
        answer.map_err(|error| match is_unsupported(&error) {
            true => CallError::Unsupported,
            false => CallError::Nvml(error.to_string()),
        })
    }
}

fn failed_probe(error: &GpuError) -> GpuProbe {
    match error {
        GpuError::Nvml(NvmlError::GpuLost | NvmlError::NotFound) => GpuProbe::Lost,
        error => GpuProbe::Failed(error.to_string()),
    }
}

fn probe_driver(nvml: &Nvml) -> Response {
    match nvml.device_count() {
        Ok(gpus) => Response::Driver {
            gpus,
            version: nvml.sys_driver_version().ok(),
        },
        Err(error) => Response::NoDriver(driver_error(&"nvmlDeviceGetCount", &error)),
    }
}
