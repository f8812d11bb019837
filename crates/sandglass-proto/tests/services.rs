//! The JSON form of the guest API, byte by byte as E2B's clients write and read it.
#![allow(clippy::unwrap_used, reason = "test code")]

use buffa_types::google::protobuf::Timestamp;
use sandglass_proto::services::filesystem::{EntryInfo, FileType};
use sandglass_proto::services::process::process_event::data_event::Output;
use sandglass_proto::services::process::process_event::{DataEvent, EndEvent, Event};
use sandglass_proto::services::process::process_input::Input;
use sandglass_proto::services::process::process_selector::Selector;
use sandglass_proto::services::process::{
    ProcessEvent, SendInputRequest, SendSignalRequest, Signal, StartRequest, StartResponse,
};

#[test]
fn a_start_is_read_whatever_else_is_in_it() {
    let text = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","echo hi"],"envs":{"A":"1"},"cwd":"/tmp"},
                   "pty":{"size":{"cols":80,"rows":24}},"tag":null,"stdin":false,"newer":{"than":["us"]}}"#;
    let request: StartRequest = serde_json::from_str(text).unwrap();
    let process = request.process.as_option().unwrap();
    assert_eq!((process.cmd.as_str(), process.args.len(), process.envs["A"].as_str()), ("/bin/bash", 3, "1"));
    assert_eq!(process.cwd.as_deref(), Some("/tmp"));
    assert_eq!(request.pty.as_option().unwrap().size.as_option().unwrap().cols, 80);
    assert_eq!((request.tag.as_deref(), request.stdin), (None, Some(false)));
}

#[test]
fn signals_come_by_name_or_number() {
    for signal in [r#""SIGNAL_SIGKILL""#, "9"] {
        let text = format!(r#"{{"process":{{"pid":7}},"signal":{signal}}}"#);
        let request: SendSignalRequest = serde_json::from_str(&text).unwrap();
        assert_eq!(request.signal.as_known(), Some(Signal::SIGNAL_SIGKILL));
        assert_eq!(request.process.as_option().unwrap().selector, Some(Selector::Pid(7)));
    }
}

#[test]
fn bytes_are_base64() {
    let request: SendInputRequest =
        serde_json::from_str(r#"{"process":{"tag":"t"},"input":{"pty":"Aw=="}}"#).unwrap();
    assert_eq!(request.input.as_option().unwrap().input, Some(Input::Pty(vec![3])));
}

#[test]
fn events_are_written_as_clients_read_them() {
    let written = |event| {
        let event = ProcessEvent { event: Some(event), ..Default::default() };
        serde_json::to_string(&StartResponse { event: event.into(), ..Default::default() }).unwrap()
    };
    let data = DataEvent { output: Some(Output::Stderr(b"hi\n\xff".to_vec())), ..Default::default() };
    assert_eq!(written(Event::Data(Box::new(data))), r#"{"event":{"data":{"stderr":"aGkK/w=="}}}"#);
    let end = EndEvent { exit_code: -1, status: "signal: killed".into(), ..Default::default() };
    assert_eq!(
        written(Event::End(Box::new(end))),
        r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed"}}}"#
    );
}

#[test]
fn sizes_are_strings_and_times_are_rfc_3339() {
    let entry = EntryInfo {
        name: "f".into(),
        r#type: FileType::FILE_TYPE_FILE.into(),
        path: "/f".into(),
        size: 5_000_000_000,
        mode: 0o644,
        modified_time: Timestamp { seconds: 1_700_000_000, nanos: 5_000_000, ..Default::default() }.into(),
        symlink_target: Some("/g".into()),
        ..Default::default()
    };
    assert_eq!(
        serde_json::to_string(&entry).unwrap(),
        r#"{"name":"f","type":"FILE_TYPE_FILE","path":"/f","size":"5000000000","mode":420,"modifiedTime":"2023-11-14T22:13:20.005Z","symlinkTarget":"/g"}"#
    );
}
