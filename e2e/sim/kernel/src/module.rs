//! Answers the calls of the kernel module: clients, their objects, and the turns of their groups.
//!
//! A client belongs to the open file that made it, and ends with it. The module takes commands from
//! this file alone. Status codes are those of `nvstatuscodes.h`.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_sim_state::rm::{
    Alloc, CHANNEL_CLASS, CLIENT_CLASS, DEVICE_CLASS, DEVICE_LEN, FIFO_GET_INFO, FIFO_INFO_LEN,
    GET_GID_INFO, GET_HANDLE_INFO, GET_TIMESLICE, GET_UUID_INFO, GID_INFO_LEN, GROUP_CLASS,
    HANDLE_INFO_LEN, SCHEDULE, SET_TIMESLICE, SUBDEVICE_CLASS, UUID_INFO_LEN,
};

use crate::turns::Turns;

/// `RS_CLIENT_HANDLE_BASE` and the number of handles from there on (`g_resserv_nvoc.h`).
const FIRST_CLIENT: u32 = 0xc1d0_0000;
const CLIENTS: u32 = 0x10_0000;

/// The slice of a new group, in microseconds (`kernel_fifo_gv100.c`).
const NEW_SLICE: u64 = 1_024;

/// Groups that a GPU has without a context, and as many more from the first context on (seen on an
/// H200 with driver 580).
const OWN_GROUPS: u32 = 3;

/// The index of `NV2080_CTRL_CMD_FIFO_GET_INFO` for the number of groups in use.
const GROUPS_IN_USE: u32 = 9;

/// A refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Refusal {
    /// `NV_ERR_INSERT_DUPLICATE_NAME`.
    Duplicate = 0x19,
    /// `NV_ERR_INSUFFICIENT_PERMISSIONS`.
    Permissions = 0x1b,
    /// `NV_ERR_INVALID_ARGUMENT`.
    Argument = 0x1f,
    /// `NV_ERR_INVALID_CLIENT`.
    Client = 0x23,
    /// `NV_ERR_INVALID_OBJECT_PARENT`.
    Parent = 0x36,
    /// `NV_ERR_NOT_SUPPORTED`.
    Unsupported = 0x56,
    /// `NV_ERR_OBJECT_NOT_FOUND`.
    NotFound = 0x57,
}

/// A group: the handles of its client and of itself.
pub type GroupKey = (u32, u32);

#[derive(Debug)]
struct Object {
    parent: u32,
    class: u32,
    /// The GPU that the object is of; none of the client itself.
    gpu: Option<usize>,
    /// Of a group: the microseconds that were last set. The GPU need not keep to them.
    note: u64,
    /// Of a group: it may run.
    is_scheduled: bool,
}

#[derive(Debug)]
struct Client {
    file: u64,
    pid: u32,
    objects: BTreeMap<u32, Object>,
}

/// A group as the module sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupState {
    /// The process that made the client.
    pub pid: u32,
    /// The group's key.
    pub key: GroupKey,
    /// The slice that was last set, in microseconds.
    pub note: u64,
    /// Whether it has work.
    pub is_busy: bool,
    /// How long it has had the GPU.
    pub finished: Duration,
}

/// The caller of a call.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// The open file.
    pub file: u64,
    /// The process.
    pub pid: u32,
}

/// The state of the kernel module.
#[derive(Debug)]
pub struct Module {
    uuids: Vec<String>,
    turns: Vec<Turns<GroupKey>>,
    clients: BTreeMap<u32, Client>,
    next_client: u32,
    is_inert: bool,
}

impl Module {
    /// A module for GPUs with these UUIDs.
    pub fn new(uuids: Vec<String>) -> Module {
        Module {
            turns: uuids.iter().map(|_| Turns::default()).collect(),
            uuids,
            clients: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            is_inert: false,
        }
    }

    /// Makes slices without effect from now on: the module notes them and no more.
    pub fn set_inert(&mut self, is_inert: bool) {
        self.is_inert = is_inert;
    }

    /// Lets time pass on all GPUs.
    pub fn advance(&mut self, time: Duration) {
        for turns in &mut self.turns {
            turns.advance(time);
        }
    }

    /// Ends the clients of a file.
    pub fn close(&mut self, file: u64) {
        let ended = self
            .clients
            .iter()
            .filter(|(_, client)| client.file == file);
        let ended: Vec<u32> = ended.map(|(handle, _)| *handle).collect();
        for handle in ended {
            self.free_client(handle);
        }
    }

    fn free_client(&mut self, handle: u32) {
        let client = self.clients.remove(&handle);
        for (object, of) in client.into_iter().flat_map(|client| client.objects) {
            if let (GROUP_CLASS, Some(gpu)) = (of.class, of.gpu) {
                self.turns[gpu].remove((handle, object));
            }
        }
    }

    /// The client, which must be of this file.
    fn client(&self, file: u64, handle: u32) -> Result<&Client, Refusal> {
        let client = self.clients.get(&handle);
        client
            .filter(|client| client.file == file)
            .ok_or(Refusal::Client)
    }

    fn object(&mut self, file: u64, (client, handle): GroupKey) -> Result<&mut Object, Refusal> {
        self.client(file, client)?;
        let client = self.clients.get_mut(&client).ok_or(Refusal::Client)?;
        client.objects.get_mut(&handle).ok_or(Refusal::NotFound)
    }

    /// Makes an object, and returns its handle. `has_open` tells whether the caller has the device
    /// node of a GPU open.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn alloc(
        &mut self,
        caller: Caller,
        call: &Alloc,
        params: &[u8],
        has_open: impl Fn(usize) -> bool,
    ) -> Result<u32, Refusal> {
        let Alloc {
            client,
            parent,
            object,
            class,
            ..
        } = *call;
        if class == CLIENT_CLASS {
            return self.alloc_client(caller);
        }
        let of = self.client(caller.file, client)?;
        if object == client || of.objects.contains_key(&object) {
            return Err(Refusal::Duplicate);
        }
        let above = of.objects.get(&parent);
        let gpu = match (class, above.map(|above| above.class)) {
            (DEVICE_CLASS, None) if parent == client && params.len() == DEVICE_LEN => {
                let gpu = word(params, 0) as usize;
                if gpu >= self.uuids.len() {
                    return Err(Refusal::Argument);
                }
                if !has_open(gpu) {
                    return Err(Refusal::Permissions);
                }
                Some(gpu)
            }
            (DEVICE_CLASS, None) => return Err(Refusal::Argument),
            (SUBDEVICE_CLASS | GROUP_CLASS, Some(DEVICE_CLASS))
            | (CHANNEL_CLASS, Some(GROUP_CLASS))
            | (_, Some(CHANNEL_CLASS)) => above.and_then(|above| above.gpu),
            _ => return Err(Refusal::Parent),
        };
        if let (GROUP_CLASS, Some(gpu)) = (class, gpu) {
            self.turns[gpu].insert((client, object), Duration::from_micros(NEW_SLICE));
        }
        let made = Object {
            parent,
            class,
            gpu,
            note: NEW_SLICE,
            is_scheduled: false,
        };
        let of = self.clients.get_mut(&client).ok_or(Refusal::Client)?;
        of.objects.insert(object, made);
        Ok(object)
    }

    fn alloc_client(&mut self, caller: Caller) -> Result<u32, Refusal> {
        let all = (0..CLIENTS)
            .map(|step| FIRST_CLIENT + (self.next_client - FIRST_CLIENT + step) % CLIENTS);
        let free = all
            .into_iter()
            .find(|handle| !self.clients.contains_key(handle));
        let handle = free.ok_or(Refusal::Argument)?;
        self.next_client = FIRST_CLIENT + (handle - FIRST_CLIENT + 1) % CLIENTS;
        let client = Client {
            file: caller.file,
            pid: caller.pid,
            objects: BTreeMap::new(),
        };
        self.clients.insert(handle, client);
        Ok(handle)
    }

    /// Frees an object with all below it, or a client.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn free(&mut self, file: u64, client: u32, object: u32) -> Result<(), Refusal> {
        self.client(file, client)?;
        if object == client {
            self.free_client(client);
            return Ok(());
        }
        let of = self.clients.get_mut(&client).ok_or(Refusal::Client)?;
        let mut ended = vec![object];
        if !of.objects.contains_key(&object) {
            return Err(Refusal::NotFound);
        }
        while let Some(handle) = ended.pop() {
            let below = of
                .objects
                .iter()
                .filter(|(_, below)| below.parent == handle);
            ended.extend(below.map(|(below, _)| *below));
            if let Some(Object {
                class: GROUP_CLASS,
                gpu: Some(gpu),
                ..
            }) = of.objects.remove(&handle)
            {
                self.turns[gpu].remove((client, handle));
            }
        }
        Ok(())
    }

    /// Carries out a command, which reads and writes its parameters in place.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn control(
        &mut self,
        file: u64,
        client: u32,
        object: u32,
        command: u32,
        params: &mut [u8],
    ) -> Result<(), Refusal> {
        self.client(file, client)?;
        match (command, params.len()) {
            (GET_UUID_INFO, UUID_INFO_LEN) if object == client => self.uuid_info(params),
            (GET_HANDLE_INFO, HANDLE_INFO_LEN) if object == client => {
                self.handle_info(client, params)
            }
            (FIFO_GET_INFO, FIFO_INFO_LEN) => {
                let gpu = self.subdevice(file, (client, object))?;
                self.fifo_info(gpu, params)
            }
            (GET_GID_INFO, GID_INFO_LEN) => {
                let gpu = self.subdevice(file, (client, object))?;
                self.gid_info(gpu, params)
            }
            (GET_TIMESLICE, 8) => {
                let note = self.group(file, (client, object))?.note;
                params.copy_from_slice(&note.to_ne_bytes());
                Ok(())
            }
            (SET_TIMESLICE, 8) => {
                let micros = params.try_into().map(u64::from_ne_bytes);
                self.set_slice(file, (client, object), micros.unwrap_or_default())
            }
            (SCHEDULE, 3) => {
                self.group(file, (client, object))?.is_scheduled = params[0] != 0;
                Ok(())
            }
            (
                GET_UUID_INFO | GET_HANDLE_INFO | FIFO_GET_INFO | GET_GID_INFO | GET_TIMESLICE
                | SET_TIMESLICE | SCHEDULE,
                _,
            ) => Err(Refusal::Argument),
            _ => Err(Refusal::Unsupported),
        }
    }

    fn group(&mut self, file: u64, key: GroupKey) -> Result<&mut Object, Refusal> {
        let object = self.object(file, key)?;
        match object.class {
            GROUP_CLASS => Ok(object),
            _ => Err(Refusal::Unsupported),
        }
    }

    /// The GPU of a subdevice.
    fn subdevice(&mut self, file: u64, key: GroupKey) -> Result<usize, Refusal> {
        let object = self.object(file, key)?;
        let gpu = object.gpu.filter(|_| object.class == SUBDEVICE_CLASS);
        gpu.ok_or(Refusal::Unsupported)
    }

    /// The UUID as text, with its final zero. No other form is known.
    fn gid_info(&self, gpu: usize, params: &mut [u8]) -> Result<(), Refusal> {
        let (index, flags) = (word(params, 0), word(params, 4));
        let uuid = self.uuids.get(gpu).filter(|_| index == 0 && flags == 0);
        let uuid = uuid.ok_or(Refusal::Argument)?;
        let text = [uuid.as_bytes(), &[0]].concat();
        put(params, 8, text.len() as u32);
        params[12..12 + text.len()].copy_from_slice(&text);
        Ok(())
    }

    fn set_slice(&mut self, file: u64, key: GroupKey, micros: u64) -> Result<(), Refusal> {
        let group = self.group(file, key)?;
        group.note = micros;
        // A slice that is set before the group is scheduled has no effect (on an H200).
        if let (Some(gpu), true) = (group.gpu, group.is_scheduled)
            && !self.is_inert
        {
            self.turns[gpu].set_slice(key, Duration::from_micros(micros));
        }
        Ok(())
    }

    fn uuid_info(&self, params: &mut [u8]) -> Result<(), Refusal> {
        let name = params[..256].split(|byte| *byte == 0).next();
        let gpu = self
            .uuids
            .iter()
            .position(|uuid| Some(uuid.as_bytes()) == name);
        let gpu = gpu.ok_or(Refusal::NotFound)? as u32;
        for (at, number) in [(260, gpu + 0x100), (264, gpu), (268, 0)] {
            put(params, at, number);
        }
        Ok(())
    }

    fn handle_info(&self, client: u32, params: &mut [u8]) -> Result<(), Refusal> {
        let (handle, index) = (word(params, 0), word(params, 4));
        let objects = &self.clients.get(&client).ok_or(Refusal::Client)?.objects;
        let (parent, class) = match objects.get(&handle) {
            Some(object) => (object.parent, object.class),
            None if handle == client => (client, CLIENT_CLASS),
            None => return Err(Refusal::NotFound),
        };
        let data = match index {
            1 => parent,
            2 => class,
            _ => return Err(Refusal::Argument),
        };
        params[8..].copy_from_slice(&u64::from(data).to_ne_bytes());
        Ok(())
    }

    fn fifo_info(&self, gpu: usize, params: &mut [u8]) -> Result<(), Refusal> {
        for entry in 0..word(params, 0).min(256) as usize {
            let at = 4 + entry * 8;
            if word(params, at) != GROUPS_IN_USE {
                return Err(Refusal::Argument);
            }
            put(params, at + 4, self.groups_in_use(gpu));
        }
        Ok(())
    }

    fn groups_in_use(&self, gpu: usize) -> u32 {
        let objects = self
            .clients
            .values()
            .flat_map(|client| client.objects.values());
        let groups =
            objects.filter(|object| object.class == GROUP_CLASS && object.gpu == Some(gpu));
        match groups.count() as u32 {
            0 => OWN_GROUPS,
            groups => 2 * OWN_GROUPS + groups,
        }
    }

    /// Gives a group work, and returns all that it was given.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn submit(&mut self, file: u64, key: GroupKey, nanos: u64) -> Result<u64, Refusal> {
        let group = self.group(file, key)?;
        let gpu = group.gpu.filter(|_| group.is_scheduled);
        Ok(gpu.map_or(0, |gpu| self.turns[gpu].submit(key, nanos)))
    }

    /// The work of a group that is done.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn done(&mut self, file: u64, key: GroupKey) -> Result<u64, Refusal> {
        let gpu = self.group(file, key)?.gpu;
        Ok(gpu.map_or(0, |gpu| self.turns[gpu].done(key)))
    }

    /// All groups of a GPU.
    pub fn groups(&self, gpu: usize) -> Vec<GroupState> {
        let mut groups = Vec::new();
        for (handle, client) in &self.clients {
            for (object, of) in &client.objects {
                let key = (*handle, *object);
                let turns = self.turns.get(gpu).filter(|_| of.gpu == Some(gpu));
                let progress = turns.and_then(|turns| turns.progress(key));
                groups.extend(progress.map(|(is_busy, finished)| GroupState {
                    pid: client.pid,
                    key,
                    note: of.note,
                    is_busy,
                    finished,
                }));
            }
        }
        groups
    }

    /// The number of clients.
    pub fn clients(&self) -> usize {
        self.clients.len()
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    word.map_or(0, u32::from_ne_bytes)
}

fn put(bytes: &mut [u8], at: usize, number: u32) {
    bytes[at..at + 4].copy_from_slice(&number.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use bursar_sim_state::rm::{COMPUTE_CLASS, ENDLESS};

    use super::*;

    const UUID: &str = "GPU-00000000-0000-0000-0000-000000000001";
    const CALLER: Caller = Caller { file: 1, pid: 10 };

    fn module() -> Module {
        Module::new(vec![UUID.to_owned()])
    }

    fn alloc(client: u32, parent: u32, object: u32, class: u32) -> Alloc {
        Alloc {
            client,
            parent,
            object,
            class,
            ..Alloc::default()
        }
    }

    /// Makes a client with a scheduled group on a device, all of one file.
    fn with_group(module: &mut Module, caller: Caller) -> GroupKey {
        let client = module
            .alloc(caller, &alloc(0, 0, 0, CLIENT_CLASS), &[], |_| false)
            .unwrap();
        for (parent, object, class, params) in [
            (client, 1, DEVICE_CLASS, &[0; DEVICE_LEN][..]),
            (1, 2, SUBDEVICE_CLASS, &[]),
            (1, 3, GROUP_CLASS, &[]),
            (3, 4, CHANNEL_CLASS, &[]),
            (4, 5, COMPUTE_CLASS, &[]),
        ] {
            module
                .alloc(
                    caller,
                    &alloc(client, parent, object, class),
                    params,
                    |_| true,
                )
                .unwrap();
        }
        let schedule = module.control(caller.file, client, 3, SCHEDULE, &mut [1, 0, 0]);
        schedule.unwrap();
        (client, 3)
    }

    fn set(module: &mut Module, file: u64, key: GroupKey, micros: u64) -> Result<(), Refusal> {
        module.control(file, key.0, key.1, SET_TIMESLICE, &mut micros.to_ne_bytes())
    }

    fn in_use(module: &mut Module, client: u32) -> u32 {
        let mut params = [0; FIFO_INFO_LEN];
        put(&mut params, 0, 1);
        put(&mut params, 4, GROUPS_IN_USE);
        module
            .control(1, client, 2, FIFO_GET_INFO, &mut params)
            .unwrap();
        word(&params, 8)
    }

    #[test]
    fn clients_are_numbered_upwards_and_end_with_their_file() {
        let mut module = module();
        let other = Caller { file: 2, pid: 11 };
        let (first, second) = (
            with_group(&mut module, CALLER),
            with_group(&mut module, other),
        );
        assert_eq!([first.0, second.0], [FIRST_CLIENT, FIRST_CLIENT + 1]);
        assert_eq!(in_use(&mut module, first.0), 8);
        module.close(2);
        assert_eq!(in_use(&mut module, first.0), 7);
        let third = with_group(&mut module, other);
        assert_eq!(
            third.0,
            FIRST_CLIENT + 2,
            "a handle is not used again at once"
        );
    }

    #[test]
    fn commands_of_another_file_are_refused() {
        let mut module = module();
        let group = with_group(&mut module, CALLER);
        assert_eq!(set(&mut module, 2, group, 1), Err(Refusal::Client));
        assert_eq!(module.free(2, group.0, 3), Err(Refusal::Client));
        assert_eq!(
            set(&mut module, 1, (group.0, 4), 1),
            Err(Refusal::Unsupported)
        );
        assert_eq!(set(&mut module, 1, (group.0, 9), 1), Err(Refusal::NotFound));
        assert_eq!(set(&mut module, 1, group, 5_000), Ok(()));
        let mut slice = [0; 8];
        let read = module.control(1, group.0, group.1, GET_TIMESLICE, &mut slice);
        assert_eq!((read, u64::from_ne_bytes(slice)), (Ok(()), 5_000));
        let short = module.control(1, group.0, group.1, GET_TIMESLICE, &mut [0; 4]);
        assert_eq!(short, Err(Refusal::Argument));
    }

    #[test]
    fn device_needs_the_gpus_open_node() {
        let mut module = module();
        let client = module.alloc(CALLER, &alloc(0, 0, 0, CLIENT_CLASS), &[], |_| false);
        let client = client.unwrap();
        let device = alloc(client, client, 1, DEVICE_CLASS);
        let mut alloc = |is_open| module.alloc(CALLER, &device, &[0; DEVICE_LEN], |_| is_open);
        assert_eq!(alloc(false), Err(Refusal::Permissions));
        assert_eq!(alloc(true), Ok(1));
        assert_eq!(alloc(true), Err(Refusal::Duplicate));
    }

    #[test]
    fn handles_tell_their_class_and_parent() {
        let mut module = module();
        let (client, _) = with_group(&mut module, CALLER);
        let mut info = |handle: u32, index: u32| {
            let mut params = [0; HANDLE_INFO_LEN];
            put(&mut params, 0, handle);
            put(&mut params, 4, index);
            let told = module.control(1, client, client, GET_HANDLE_INFO, &mut params);
            told.map(|()| word(&params, 8))
        };
        assert_eq!(info(client, 2), Ok(CLIENT_CLASS));
        assert_eq!([info(5, 2), info(5, 1)], [Ok(COMPUTE_CLASS), Ok(4)]);
        assert_eq!([info(4, 1), info(3, 2)], [Ok(3), Ok(GROUP_CLASS)]);
        assert_eq!(info(9, 2), Err(Refusal::NotFound));
        let mut gid = [0; GID_INFO_LEN];
        let told = module.control(1, client, 2, GET_GID_INFO, &mut gid);
        assert_eq!((told, word(&gid, 8)), (Ok(()), 41));
        assert!(gid[12..].starts_with(UUID.as_bytes()));
    }

    #[test]
    fn inert_module_notes_slices_and_shares_evenly() {
        for (is_inert, expected) in [(false, [90, 10]), (true, [50, 50])] {
            let mut module = module();
            module.set_inert(is_inert);
            let groups = [1, 2].map(|file| with_group(&mut module, Caller { file, pid: 1 }));
            for (file, group) in (1..).zip(groups) {
                module.submit(file, group, ENDLESS).unwrap();
            }
            set(&mut module, 1, groups[0], 9_000).unwrap();
            set(&mut module, 2, groups[1], 1_000).unwrap();
            module.advance(Duration::from_secs(10));
            let states = module.groups(0);
            assert_eq!([states[0].note, states[1].note], [9_000, 1_000]);
            let parts = states
                .iter()
                .map(|state| state.finished.as_secs_f64() * 10.0);
            let parts: Vec<i64> = parts.map(|part| part.round() as i64).collect();
            assert_eq!(parts, expected);
        }
    }

    #[test]
    fn slice_before_the_schedule_has_no_effect_and_a_freed_group_ends() {
        let mut module = module();
        let (client, group) = with_group(&mut module, CALLER);
        module
            .alloc(CALLER, &alloc(client, 1, 6, GROUP_CLASS), &[], |_| true)
            .unwrap();
        set(&mut module, 1, (client, 6), 100_000).unwrap();
        module
            .control(1, client, 6, SCHEDULE, &mut [1, 0, 0])
            .unwrap();
        for key in [(client, group), (client, 6)] {
            module.submit(1, key, ENDLESS).unwrap();
        }
        module.advance(Duration::from_secs(1));
        let [one, other] = &module.groups(0)[..] else {
            panic!("two groups");
        };
        assert!(one.finished.abs_diff(other.finished) < Duration::from_millis(2));
        module.free(1, client, 6).unwrap();
        assert_eq!(module.groups(0).len(), 1);
        module.free(1, client, 1).unwrap();
        assert_eq!((module.groups(0).len(), module.clients()), (0, 1));
    }
}
