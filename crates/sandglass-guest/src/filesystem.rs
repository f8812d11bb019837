//! The filesystem service. As E2B's daemon does, it acts with the agent's rights and gives what it makes to the
//! requesting user: who holds the access token may act as any user of the sandbox anyway.

mod entry;
#[cfg(test)]
mod races;
mod tree;
mod watch;

use std::sync::Arc;

use connectrpc::{
    ConnectError, Encodable, ErrorCode, RequestContext, Response, ServiceRequest, ServiceResult,
    ServiceStream,
};
use rustix::fs::{AtFlags, FileType as Kind};
use rustix::io::Errno;
use sandglass_proto::services::filesystem::{
    self as wire, CreateWatcherRequest, CreateWatcherResponse, EntryInfo, GetWatcherEventsRequest,
    GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse, MoveRequest,
    MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest, RemoveWatcherResponse, StatRequest,
    StatResponse, WatchDirRequest, WatchDirResponse,
};

use crate::agent::Agent;
use crate::exec::Identity;
use crate::http::context;
use crate::metadata::Labels;
use crate::path::{self, PathError, Purpose, Walk, borrow, file_type, resolve};
use crate::process::absolute;
use crate::users::{User, Users};

pub(crate) use entry::{Describer, Found, describe};
pub(crate) use watch::Watchers;

/// The service.
#[derive(Debug)]
pub(crate) struct FilesystemService(pub(crate) Arc<Agent>);

impl From<PathError> for ConnectError {
    fn from(error: PathError) -> Self {
        let code = match &error {
            PathError::NotFound(_) => ErrorCode::NotFound,
            PathError::NotADirectory(_) | PathError::Invalid(_) => ErrorCode::InvalidArgument,
            PathError::Loop(_) => ErrorCode::FailedPrecondition,
            PathError::Changed(_) => ErrorCode::Aborted,
            PathError::Magic(_) | PathError::Denied(_) => ErrorCode::PermissionDenied,
            PathError::Io { errno, .. } => code(*errno),
        };
        match &error {
            PathError::Io { errno, .. } => Self::new(code, format!("{error}: {errno}")),
            _ => Self::new(code, error.to_string()),
        }
    }
}

/// What a refusal of the kernel means to a client.
fn code(errno: Errno) -> ErrorCode {
    match errno {
        Errno::NOENT => ErrorCode::NotFound,
        Errno::EXIST => ErrorCode::AlreadyExists,
        Errno::NOTDIR | Errno::ISDIR | Errno::INVAL | Errno::NAMETOOLONG => ErrorCode::InvalidArgument,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorCode::PermissionDenied,
        Errno::NOTEMPTY | Errno::BUSY | Errno::LOOP | Errno::XDEV => ErrorCode::FailedPrecondition,
        Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE => ErrorCode::ResourceExhausted,
        _ => ErrorCode::Internal,
    }
}

/// A failed step on a path.
fn failed(step: &str, path: &str, errno: Errno) -> ConnectError {
    ConnectError::new(code(errno), format!("{step} '{path}' failed: {errno}"))
}

/// What every operation needs.
struct Call {
    root: std::os::fd::OwnedFd,
    users: Users,
    labels: Arc<Labels>,
    user: User,
}

impl Call {
    const fn identity(&self) -> &Identity {
        &self.user.identity
    }

    fn describer(&self) -> Describer<'_> {
        Describer { root: &self.root, users: &self.users, labels: &self.labels }
    }

    /// Describes what is at `path` now.
    fn entry(&self, path: &str) -> Result<EntryInfo, ConnectError> {
        let place = resolve(borrow(&self.root), path, Walk::NO_FOLLOW)?;
        let stat = place.existing()?;
        Ok(describe(self.describer(), Found { path, dir: &place.dir, name: place.name(), stat }))
    }

    fn make_dir(&self, path: &str) -> Result<EntryInfo, ConnectError> {
        let before = resolve(borrow(&self.root), path, Walk::FOLLOW);
        match before.as_ref().ok().and_then(|place| place.stat.as_ref()) {
            Some(stat) if file_type(stat) == Kind::Directory => {
                return Err(ConnectError::already_exists(format!("directory already exists: {path}")));
            }
            Some(_) => {
                return Err(ConnectError::invalid_argument(format!(
                    "path already exists but is not a directory: {path}"
                )));
            }
            None => {}
        }
        let walk = Walk { follow_last: true, purpose: Purpose::MakeAll(self.identity()) };
        resolve(borrow(&self.root), path, walk)?;
        self.entry(path)
    }

    fn rename(&self, from: &str, to: &str) -> Result<EntryInfo, ConnectError> {
        let walk = Walk { follow_last: false, purpose: Purpose::Change(self.identity()) };
        let source = resolve(borrow(&self.root), from, walk)?;
        source.existing()?;
        let walk = Walk { purpose: Purpose::MakeParents(self.identity()), ..walk };
        let destination = resolve(borrow(&self.root), to, walk)?;
        if source.is_self() || destination.is_self() {
            return Err(ConnectError::invalid_argument("the root directory can't be moved or replaced"));
        }
        source.check_entry(self.identity())?;
        destination.check_entry(self.identity())?;
        let kind = file_type(source.existing()?);
        // As the kernel has it for others than root: a folder that gets another one above it is changed itself.
        if kind == Kind::Directory
            && (source.led || destination.led)
            && !source.is_beside(&destination).map_err(|errno| failed("moving", from, errno))?
            && !path::may_move(source.existing()?, self.identity())
        {
            return Err(PathError::Denied(from.to_owned()).into());
        }
        rustix::fs::renameat(&source.dir, source.name(), &destination.dir, destination.name())
            .map_err(|errno| failed("moving", from, errno))?;
        // It is told from where it was put, for by now its path may lead elsewhere.
        let stat = rustix::fs::statat(&destination.dir, destination.name(), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| failed("looking at", to, errno))?;
        let found = Found { path: to, dir: &destination.dir, name: destination.name(), stat: &stat };
        Ok(describe(self.describer(), found))
    }

    fn list(&self, path: &str, depth: u32) -> Result<Vec<EntryInfo>, ConnectError> {
        let place = resolve(borrow(&self.root), path, Walk::FOLLOW)?;
        if file_type(place.existing()?) != Kind::Directory {
            return Err(ConnectError::invalid_argument(format!("path is not a directory: {path}")));
        }
        let depth = usize::try_from(depth.max(1)).unwrap_or(usize::MAX);
        tree::list(&place, path, depth, |found| describe(self.describer(), found))
    }

    fn remove(&self, path: &str) -> Result<(), ConnectError> {
        let walk = Walk { follow_last: false, purpose: Purpose::Change(self.identity()) };
        let place = match resolve(borrow(&self.root), path, walk) {
            Err(PathError::NotFound(_)) => return Ok(()),
            other => other?,
        };
        if place.is_self() {
            return Err(ConnectError::invalid_argument("the root directory can't be removed"));
        }
        place.check_entry(self.identity())?;
        match &place.stat {
            None => Ok(()),
            Some(stat) if file_type(stat) == Kind::Directory => {
                tree::remove(&place, path, place.guard(self.identity()))
            }
            Some(_) => match rustix::fs::unlinkat(&place.dir, place.name(), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(failed("removing", path, errno)),
            },
        }
    }
}

impl FilesystemService {
    /// Runs an operation on paths as the client wrote them, on a thread that may wait for the disk.
    async fn run<T: Send + 'static, const N: usize>(
        &self,
        ctx: &RequestContext,
        paths: [String; N],
        operation: impl FnOnce(&Call, [String; N]) -> Result<T, ConnectError> + Send + 'static,
    ) -> Result<T, ConnectError> {
        let user = context::user(ctx)?;
        let settings = context::settings(ctx)?;
        let agent = Arc::clone(&self.0);
        self.0
            .blocking
            .run(move || {
                let failed =
                    |error: std::io::Error| ConnectError::internal(format!("preparing failed: {error}"));
                let mut cleaned = paths;
                for path in &mut cleaned {
                    *path = path::clean(&absolute(path, &user, &settings)?)?;
                }
                let call = Call {
                    root: path::open_root(&agent.root).map_err(failed)?,
                    users: agent.users().map_err(failed)?,
                    labels: Arc::clone(&agent.labels),
                    user,
                };
                operation(&call, cleaned)
            })
            .await
    }
}

impl wire::Filesystem for FilesystemService {
    async fn stat<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StatRequest>,
    ) -> ServiceResult<impl Encodable<StatResponse> + Send + use<'a>> {
        let path = request.to_owned_message().path;
        let entry = self.run(&ctx, [path], |call, [path]| call.entry(&path)).await?;
        Response::ok(StatResponse { entry: entry.into(), ..Default::default() })
    }

    async fn make_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<MakeDirResponse> + Send + use<'a>> {
        let path = request.to_owned_message().path;
        let entry = self.run(&ctx, [path], |call, [path]| call.make_dir(&path)).await?;
        Response::ok(MakeDirResponse { entry: entry.into(), ..Default::default() })
    }

    async fn r#move<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<impl Encodable<MoveResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let paths = [request.source, request.destination];
        let entry = self.run(&ctx, paths, |call, [from, to]| call.rename(&from, &to)).await?;
        Response::ok(MoveResponse { entry: entry.into(), ..Default::default() })
    }

    async fn list_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<impl Encodable<ListDirResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let depth = request.depth;
        let entries = self.run(&ctx, [request.path], move |call, [path]| call.list(&path, depth)).await?;
        Response::ok(ListDirResponse { entries, ..Default::default() })
    }

    async fn remove<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<impl Encodable<RemoveResponse> + Send + use<'a>> {
        let path = request.to_owned_message().path;
        self.run(&ctx, [path], |call, [path]| call.remove(&path)).await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<WatchDirResponse> + Send + use<>>> {
        let WatchDirRequest { path, recursive, include_entry, allow_network_mounts, .. } =
            request.to_owned_message();
        let request = watch::Request { path, recursive, include_entry, allow_network_mounts };
        let watcher = self.watch(&ctx, request).await?;
        Response::ok(Box::pin(watch::events(watcher, context::keepalive(&ctx))))
    }

    async fn create_watcher<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, CreateWatcherRequest>,
    ) -> ServiceResult<impl Encodable<CreateWatcherResponse> + Send + use<'a>> {
        let CreateWatcherRequest { path, recursive, include_entry, allow_network_mounts, .. } =
            request.to_owned_message();
        let request = watch::Request { path, recursive, include_entry, allow_network_mounts };
        let watcher_id = self.0.watchers.keep(self.watch(&ctx, request).await?);
        Response::ok(CreateWatcherResponse { watcher_id, ..Default::default() })
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<GetWatcherEventsResponse> + Send + use<'a>> {
        let watcher = self.0.watchers.find(&request.to_owned_message().watcher_id)?;
        let events = watcher.take().await?;
        Response::ok(GetWatcherEventsResponse { events, ..Default::default() })
    }

    async fn remove_watcher<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, RemoveWatcherRequest>,
    ) -> ServiceResult<impl Encodable<RemoveWatcherResponse> + Send + use<'a>> {
        self.0.watchers.remove(&request.to_owned_message().watcher_id)?;
        Response::ok(RemoveWatcherResponse::default())
    }
}
