//! The process service. Its semantics are those of E2B's daemon, on which its clients rely.

mod exit;
mod live;
mod output;
mod prepare;
mod registry;
mod stdio;
mod stream;

use std::sync::Arc;

use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult,
    ServiceStream,
};
use futures_util::StreamExt as _;
use sandglass_proto::services::process::{
    self as wire, CloseStdinRequest, CloseStdinResponse, ConnectRequest, ConnectResponse, ListRequest,
    ListResponse, ProcessInfo, ProcessInput, ProcessSelector, SendInputRequest, SendInputResponse,
    SendSignalRequest, SendSignalResponse, Signal, StartRequest, StartResponse, StreamInputRequest,
    StreamInputResponse, UpdateRequest, UpdateResponse,
};

use crate::agent::Agent;
use crate::http::context::{self, StartLimit};

pub(crate) use live::Process;
pub(crate) use output::Origin;
pub(crate) use prepare::{DEFAULT_PATH, absolute, basics, c_string, env_strings, look_up};
pub(crate) use registry::Registry;
pub(crate) use stdio::{Size, raw_terminal, winsize};

/// The service.
#[derive(Debug)]
pub(crate) struct ProcessService(pub(crate) Arc<Agent>);

fn not_found(selector: &ProcessSelector) -> ConnectError {
    use wire::process_selector::Selector;
    match &selector.selector {
        Some(Selector::Pid(pid)) => ConnectError::not_found(format!("process with pid {pid} not found")),
        Some(Selector::Tag(tag)) => ConnectError::not_found(format!("process with tag {tag:?} not found")),
        None => ConnectError::invalid_argument("no process was selected"),
    }
}

impl ProcessService {
    fn running(&self, selector: &ProcessSelector) -> Result<Arc<Process>, ConnectError> {
        self.0.processes.find_running(selector).ok_or_else(|| not_found(selector))
    }
}

async fn feed(process: &Process, input: ProcessInput) -> Result<(), ConnectError> {
    use wire::process_input::Input;
    match input.input {
        Some(Input::Stdin(bytes)) => process.write_stdin(&bytes).await,
        Some(Input::Pty(bytes)) => process.write_terminal(&bytes).await,
        None => Err(ConnectError::invalid_argument("no input was given")),
    }
}

impl wire::Process for ProcessService {
    async fn list<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, ListRequest>,
    ) -> ServiceResult<impl Encodable<ListResponse> + Send + use<'a>> {
        let info = |process: Arc<Process>| ProcessInfo {
            config: process.config().clone().into(),
            pid: process.pid(),
            tag: process.tag().map(Into::into),
            ..Default::default()
        };
        let processes = self.0.processes.running().into_iter().map(info).collect();
        Response::ok(ListResponse { processes, ..Default::default() })
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ConnectRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<ConnectResponse> + Send + use<>>> {
        let selector = request.to_owned_message().process.into_option().unwrap_or_default();
        let process = self.0.processes.find(&selector).ok_or_else(|| not_found(&selector))?;
        let subscription = process
            .output()
            .attach(context::origin(&ctx))
            .ok_or_else(|| ConnectError::resource_exhausted("too many are attached to this process"))?;
        let events = stream::events(process, subscription, context::keepalive(&ctx), false);
        Response::ok(Box::pin(
            events.map(|event| {
                event.map(|event| ConnectResponse { event: event.into(), ..Default::default() })
            }),
        ))
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<StartResponse> + Send + use<>>> {
        let request = request.to_owned_message();
        let user = context::user(&ctx)?;
        let settings = context::settings(&ctx)?;
        let limit = ctx.extensions().get::<StartLimit>().map(|limit| limit.0);
        let (agent, origin) = (Arc::clone(&self.0), context::origin(&ctx));
        // In a task: a client that goes away at this moment must not leave a process that nobody looks after.
        let started = self.0.tasks.spawn(async move {
            Box::pin(live::start(&agent, request, user, settings, limit, origin)).await
        });
        let (process, subscription) =
            started.await.map_err(|_| ConnectError::internal("the start was interrupted"))??;
        let events = stream::events(process, subscription, context::keepalive(&ctx), true);
        Response::ok(Box::pin(
            events
                .map(|event| event.map(|event| StartResponse { event: event.into(), ..Default::default() })),
        ))
    }

    async fn update<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, UpdateRequest>,
    ) -> ServiceResult<impl Encodable<UpdateResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.running(&request.process.into_option().unwrap_or_default())?;
        if let Some(size) = request.pty.into_option().and_then(|pty| pty.size.into_option()) {
            process.resize(&self.0, live::terminal_size(size.cols, size.rows)).await?;
        }
        Response::ok(UpdateResponse::default())
    }

    async fn stream_input<'a>(
        &'a self,
        _ctx: RequestContext,
        mut requests: InboundStream<StreamInputRequest>,
    ) -> ServiceResult<impl Encodable<StreamInputResponse> + Send + use<'a>> {
        use wire::stream_input_request::Event;
        let mut process = None;
        while let Some(request) = requests.next().await {
            match (request?.to_owned_message().event, &process) {
                (Some(Event::Start(start)), _) => {
                    process = Some(self.running(&start.process.into_option().unwrap_or_default())?);
                }
                (Some(Event::Data(data)), Some(process)) => {
                    feed(process, data.input.into_option().unwrap_or_default()).await?;
                }
                (Some(Event::Data(_)), None) => {
                    return Err(ConnectError::invalid_argument("input came before a process was selected"));
                }
                (Some(Event::Keepalive(_)) | None, _) => {}
            }
        }
        Response::ok(StreamInputResponse::default())
    }

    async fn send_input<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, SendInputRequest>,
    ) -> ServiceResult<impl Encodable<SendInputResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.running(&request.process.into_option().unwrap_or_default())?;
        feed(&process, request.input.into_option().unwrap_or_default()).await?;
        Response::ok(SendInputResponse::default())
    }

    async fn send_signal<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, SendSignalRequest>,
    ) -> ServiceResult<impl Encodable<SendSignalResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.running(&request.process.into_option().unwrap_or_default())?;
        match request.signal.as_known() {
            Some(Signal::SIGNAL_SIGKILL) => process.kill(&self.0).await,
            Some(Signal::SIGNAL_SIGTERM) => process.terminate(&self.0),
            _ => return Err(ConnectError::unimplemented("only SIGKILL and SIGTERM can be sent")),
        }
        Response::ok(SendSignalResponse::default())
    }

    async fn close_stdin<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, CloseStdinRequest>,
    ) -> ServiceResult<impl Encodable<CloseStdinResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        self.running(&request.process.into_option().unwrap_or_default())?.close_stdin().await?;
        Response::ok(CloseStdinResponse::default())
    }
}
