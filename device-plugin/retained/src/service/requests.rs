//! Answers the requests of tenants about leases and memory tokens.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bursar_host::clock;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::fdstore::{Blob, Refusal};
use bursar_protocol::messages::Account;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use bursar_sessions::lease_handle::{Caller, Reply};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::store::encode_record;
use super::{Acks, Completion, GRANULARITY, State, reply_refused};
use crate::fdstore_client::{Connection, FdStoreError, SentDescriptor};
use crate::leases::{Content, LeaseRecord, OpenRequest, Opened, WRITE_TOKEN_LIFETIME};
use crate::tokens::TokenAuthority;
use bursar_supervision::provisioners::{ProvisionerError, Provisioners};
use bursar_supervision::scrub_check::Verdict;

/// The memory of a new lease.
pub(super) struct CreatedMemory {
    /// The descriptor for the tenant.
    fd: OwnedFd,
    /// The descriptor for the fd store.
    sent: SentDescriptor,
    /// The number of the connection that has the descriptor.
    connection: u64,
}

/// Why a lease was not created.
pub(super) enum CreateError {
    /// No memory exists.
    NotCreated(RetainedRefusal),
    /// The memory may exist.
    Unknown,
}

impl State {
    pub(super) fn handle_request(
        &mut self,
        caller: Caller,
        request: RetainedRequest,
        reply: oneshot::Sender<Reply>,
    ) {
        match request {
            RetainedRequest::Open {
                version: _,
                image,
                account,
                name,
                key,
                bytes,
            } => {
                let Some(gpu) = account_gpu(&account) else {
                    return reply_refused(reply, RetainedRefusal::Missing);
                };
                let Some(bytes) = bytes.checked_next_multiple_of(GRANULARITY) else {
                    return reply_refused(reply, RetainedRefusal::Quota { free: 0 });
                };
                let open = OpenRequest {
                    gpu,
                    name: name.as_str().to_owned(),
                    key,
                    bytes: Bytes(bytes),
                    image,
                    token: rand::random(),
                };
                self.open(caller, open, reply);
            }
            RetainedRequest::Commit {
                version: _,
                lease,
                token,
                checksum,
            } => {
                let lease = LeaseId(lease);
                let now = clock::now();
                let committed = self.leases.commit(caller, lease, token, checksum, now);
                match committed {
                    Ok(effects) => {
                        info!(%lease, allocation = %caller.allocation, "lease committed");
                        let acks = self.apply_effects(effects);
                        self.reply_after_acks(acks, RetainedResponse::Committed, reply);
                    }
                    Err(why) => reply_refused(reply, why),
                }
            }
            RetainedRequest::Discard { version: _, lease } => {
                self.discard(caller, LeaseId(lease), reply);
            }
        }
    }

    fn discard(&mut self, caller: Caller, lease: LeaseId, reply: oneshot::Sender<Reply>) {
        let effects = match self.leases.discard(caller, lease) {
            Ok(effects) => effects,
            Err(why) => return reply_refused(reply, why),
        };
        info!(%lease, allocation = %caller.allocation, "lease discarded");
        let ends = self.leases.get(lease).is_none();
        if ends {
            self.discarding.entry(lease).or_default().push(reply);
            self.apply_effects(effects);
        } else {
            let acks = self.apply_effects(effects);
            self.reply_after_acks(acks, RetainedResponse::Discarded, reply);
        }
    }

    pub(super) fn handle_token_request(
        &self,
        caller: Caller,
        request: TokenRequest,
    ) -> TokenResponse {
        let authority = TokenAuthority {
            key: &self.service.key,
            leases: &self.leases,
            images: |allocation: &_| self.service.sessions.process_images(allocation),
        };
        let answer = match request {
            TokenRequest::Seal {
                version: _,
                account,
                lease,
                block,
            } => account_gpu(&account)
                .ok_or(TokenRefusal::Unknown)
                .and_then(|gpu| authority.seal(caller, &gpu, LeaseId(lease), block))
                .map(TokenResponse::Sealed),
            TokenRequest::Redeem { version: _, token } => authority
                .redeem(caller, &token)
                .map(TokenResponse::Redeemed),
        };
        answer.unwrap_or_else(TokenResponse::Refused)
    }

    fn open(&mut self, caller: Caller, open: OpenRequest, reply: oneshot::Sender<Reply>) {
        if self.service.store_events.is_none() {
            return reply_refused(reply, RetainedRefusal::Off);
        }
        let gpu = open.gpu.clone();
        let (opened, effects) = self.leases.open(caller, open, clock::now());
        let acks = self.apply_effects(effects);
        match opened {
            Err(why) => reply_refused(reply, why),
            Ok(Opened::Read(lease) | Opened::Write(lease)) => {
                self.fetch_and_reply(lease, acks, reply)
            }
            Ok(Opened::Create(record)) => match self.connection_for_create(&gpu) {
                Ok(connection) => self.create(*record, connection, reply),
                Err(why) => reply_refused(reply, why),
            },
        }
    }

    /// The connection with which a lease may be created on a GPU.
    fn connection_for_create(&self, gpu: &GpuUuid) -> Result<Connection, RetainedRefusal> {
        match self.service.scrub_cache.get(gpu, &self.driver_epoch(gpu)) {
            Some(Verdict::Scrubbed) => self.connection.clone().ok_or(RetainedRefusal::Unavailable),
            Some(Verdict::NotScrubbed | Verdict::Unknown(_)) => Err(RetainedRefusal::NotScrubbed),
            None => Err(RetainedRefusal::Unavailable),
        }
    }

    /// Checks that the GPU may lend `bytes` more. Returns how much it may lend.
    pub(super) fn check_gpu_limit(
        &self,
        gpu: &GpuUuid,
        bytes: Bytes,
    ) -> Result<Bytes, RetainedRefusal> {
        let most = self.service.per_gpu.unwrap_or(Bytes(u64::MAX));
        let free = most.0.saturating_sub(self.leases.lent_by(gpu).0);
        match bytes.0 <= free {
            true => Ok(Bytes(free)),
            false => Err(RetainedRefusal::GpuLimit { free }),
        }
    }

    /// Charges the owner, then starts the creation.
    fn create(
        &mut self,
        record: LeaseRecord,
        connection: Connection,
        reply: oneshot::Sender<Reply>,
    ) {
        let (gpu, bytes) = (record.title.gpu.clone(), record.bytes);
        let Some(blob) = encode_record(&record) else {
            return reply_refused(reply, RetainedRefusal::TooMany);
        };
        let lendable = match self.check_gpu_limit(&gpu, bytes) {
            Ok(lendable) => lendable,
            Err(why) => return reply_refused(reply, why),
        };
        let lease = self.service.lease_ids.assign();
        let sessions = &self.service.sessions;
        if let Err(Bytes(free)) = sessions.charge_lease(&record.owner, &gpu, lease, bytes) {
            return reply_refused(reply, RetainedRefusal::Quota { free });
        }
        self.leases.begin_create(lease, record);
        let provisioners = Arc::clone(&self.service.provisioners);
        self.jobs.spawn(async move {
            let created = match create_memory(&provisioners, &gpu, bytes, lendable).await {
                Ok(fd) => send_memory(&connection, lease, blob, fd).await,
                Err(why) => Err(why),
            };
            Completion::Created {
                lease,
                created,
                reply,
            }
        });
    }

    pub(super) fn finish_create(
        &mut self,
        lease: LeaseId,
        created: Result<CreatedMemory, CreateError>,
        reply: oneshot::Sender<Reply>,
    ) {
        let current = self.connection.as_ref().map(Connection::number);
        match created {
            Ok(CreatedMemory {
                fd,
                sent,
                connection,
            }) if Some(connection) == current => {
                self.jobs.spawn(async move {
                    match sent.stored().await {
                        Err(FdStoreError::Refused(refusal)) => {
                            Completion::NotStored(lease, refusal)
                        }
                        // The next connection lists the lease if the fd store has it.
                        Ok(()) | Err(FdStoreError::Disconnected) => Completion::Nothing,
                    }
                });
                let (record, effects) = self.leases.finish_create(lease);
                let answer = record.and_then(|record| answer(lease, record));
                let acks = reply.send(match answer {
                    Some(answer) => Reply {
                        response: answer,
                        fd: Some(fd),
                    },
                    None => Reply::refused(RetainedRefusal::Fenced),
                });
                info!(%lease, "lease created");
                self.apply_effects(effects);
                if acks.is_err() {
                    // The requester timed out, so no process would ever write or discard this
                    // lease.
                    let effects = self.leases.release_uncertain(lease);
                    self.apply_effects(effects);
                }
            }
            Err(CreateError::NotCreated(why)) => {
                if let Some(owner) = self.leases.abort_create(lease) {
                    self.service.sessions.refund_lease(&owner, lease);
                }
                reply_refused(reply, why);
            }
            // The fd store of an earlier connection may have been replaced. Its list was read
            // without the lease.
            Ok(_) | Err(CreateError::Unknown) => {
                let effects = self.leases.release_uncertain(lease);
                self.apply_effects(effects);
                reply_refused(reply, RetainedRefusal::Unavailable);
            }
        }
    }

    /// Ends a lease whose descriptor the fd store refused. Its writer may have the memory mapped,
    /// and cannot commit.
    pub(super) fn end_unstored(&mut self, lease: LeaseId, refusal: Refusal) {
        warn!(%lease, error = %refusal, "failed to store a lease in the fd store");
        let effects = self.leases.release_uncertain(lease);
        self.apply_effects(effects);
    }

    /// Replies with a lease's descriptor and current state.
    fn fetch_and_reply(&mut self, lease: LeaseId, acks: Acks, reply: oneshot::Sender<Reply>) {
        let (Some(connection), Some(record)) = (&self.connection, self.leases.get(lease)) else {
            return reply_refused(reply, RetainedRefusal::Unavailable);
        };
        let Some(answer) = answer(lease, record) else {
            return reply_refused(reply, RetainedRefusal::Missing);
        };
        let fetched = connection.get(lease);
        self.jobs.spawn(async move {
            let acks = acks.wait().await;
            let _ = match acks.and(fetched.await) {
                Ok(fd) => reply.send(Reply {
                    response: answer,
                    fd: Some(fd),
                }),
                Err(_) => reply.send(Reply::refused(RetainedRefusal::Unavailable)),
            };
            Completion::Nothing
        });
    }

    /// Replies once the fd store has acknowledged the calls.
    fn reply_after_acks(
        &mut self,
        acks: Acks,
        answer: RetainedResponse,
        reply: oneshot::Sender<Reply>,
    ) {
        self.jobs.spawn(async move {
            let _ = reply.send(match acks.wait().await {
                Ok(()) => Reply {
                    response: answer,
                    fd: None,
                },
                Err(_) => Reply::refused(RetainedRefusal::Unavailable),
            });
            Completion::Nothing
        });
    }
}

/// Creates the memory of a lease.
async fn create_memory(
    provisioners: &Provisioners,
    gpu: &GpuUuid,
    bytes: Bytes,
    lendable: Bytes,
) -> Result<OwnedFd, CreateError> {
    match provisioners.create(gpu, bytes, lendable).await {
        Ok(fd) => Ok(fd),
        Err(ProvisionerError::Driver { code, .. }) => {
            Err(CreateError::NotCreated(RetainedRefusal::Driver { code }))
        }
        Err(error @ (ProvisionerError::Exited(_) | ProvisionerError::TimedOut(_))) => {
            warn!(%gpu, %error, "failed to create a lease");
            Err(CreateError::NotCreated(RetainedRefusal::Unavailable))
        }
        Err(ProvisionerError::Hung) => Err(CreateError::Unknown),
    }
}

/// Sends a lease's descriptor to the fd store. The tenant gets the descriptor before the fd store's
/// answer, which takes as long as waking two processes.
pub(super) async fn send_memory(
    connection: &Connection,
    lease: LeaseId,
    blob: Blob,
    fd: OwnedFd,
) -> Result<CreatedMemory, CreateError> {
    let Ok(tenants) = fd.try_clone() else {
        return Err(CreateError::Unknown);
    };
    match connection.put(lease, blob, fd).await {
        Ok(sent) => Ok(CreatedMemory {
            fd: tenants,
            sent,
            connection: connection.number(),
        }),
        Err(error) => {
            warn!(%lease, %error, "failed to send a lease to the fd store");
            Err(CreateError::Unknown)
        }
    }
}

/// The response to an open of a lease.
fn answer(lease: LeaseId, record: &LeaseRecord) -> Option<RetainedResponse> {
    let (lease, bytes) = (lease.0, record.bytes.0);
    match &record.content {
        Content::Committed { checksum, .. } => Some(RetainedResponse::Ready {
            lease,
            generation: lease,
            bytes,
            checksum: *checksum,
        }),
        Content::Writing(writer) => Some(RetainedResponse::Write {
            lease,
            generation: lease,
            bytes,
            token: writer.token,
            expires_ms: u64::try_from(WRITE_TOKEN_LIFETIME.as_millis()).unwrap_or(u64::MAX),
        }),
        Content::Discarded => None,
    }
}

fn account_gpu(account: &Account) -> Option<GpuUuid> {
    account.device_uuid()?.parse().ok()
}
