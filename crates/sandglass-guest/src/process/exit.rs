//! The end of a process in the words of E2B's clients, which are those of Go's standard library.

use sandglass_proto::services::process::process_event::EndEvent;

use super::output::Cause;
use crate::reaper::Status;

/// What Go calls the signals of Linux.
const SIGNALS: [&str; 31] = [
    "hangup",
    "interrupt",
    "quit",
    "illegal instruction",
    "trace/breakpoint trap",
    "aborted",
    "bus error",
    "floating point exception",
    "killed",
    "user defined signal 1",
    "segmentation fault",
    "user defined signal 2",
    "broken pipe",
    "alarm clock",
    "terminated",
    "stack fault",
    "child exited",
    "continued",
    "stopped (signal)",
    "stopped",
    "stopped (tty input)",
    "stopped (tty output)",
    "urgent I/O condition",
    "CPU time limit exceeded",
    "file size limit exceeded",
    "virtual timer expired",
    "profiling timer expired",
    "window changed",
    "I/O possible",
    "power failure",
    "bad system call",
];

/// The event that ends a stream.
pub(crate) fn end_event(status: Status, cause: Cause) -> EndEvent {
    let (code, exited, text) = match status {
        Status::Exited(code) => (code, true, format!("exit status {code}")),
        Status::Signaled(signal) => {
            let name = usize::try_from(signal - 1).ok().and_then(|index| SIGNALS.get(index));
            let text =
                name.map_or_else(|| format!("signal: signal {signal}"), |name| format!("signal: {name}"));
            (-1, false, text)
        }
    };
    let error = (code != 0).then(|| match cause {
        Cause::Memory => {
            format!("{text}: the sandbox ran out of memory, and this command had the largest process")
        }
        Cause::Itself | Cause::TimeLimit => text.clone(),
    });
    EndEvent { exit_code: code, exited, status: text, error, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_clients_expect() {
        let json = |status| serde_json::to_string(&end_event(status, Cause::Itself)).unwrap();
        assert_eq!(json(Status::Exited(0)), r#"{"exited":true,"status":"exit status 0"}"#);
        assert_eq!(
            json(Status::Exited(3)),
            r#"{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}"#
        );
        assert_eq!(
            json(Status::Signaled(9)),
            r#"{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}"#
        );
        let killed = end_event(Status::Signaled(9), Cause::Memory);
        assert_eq!((killed.exit_code, &*killed.status), (-1, "signal: killed"));
        assert!(killed.error.unwrap().starts_with("signal: killed: the sandbox ran out of memory"));
        assert_eq!(end_event(Status::Signaled(64), Cause::Itself).status, "signal: signal 64");
    }
}
