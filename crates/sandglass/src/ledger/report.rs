//! The verdict for people and for programs.

use std::collections::BTreeMap;
use std::io::Write;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use sandglass_types::{InstanceId, SandboxId};
use serde::Serialize;

use super::claim::Claim;
use super::judge::{Count, Kind, Missing, Object, Verdict};

/// The JSON form. Scripts rely on it: fields are added, never renamed.
#[derive(Serialize)]
struct Document<'a> {
    instance: &'a InstanceId,
    clean: bool,
    server: &'static str,
    sandboxes: usize,
    counts: &'a BTreeMap<Kind, Count>,
    left_over: Vec<LeftOver<'a>>,
    missing: &'a [Missing],
    unreadable: &'a [String],
}

#[derive(Serialize)]
struct LeftOver<'a> {
    kind: Kind,
    name: &'a str,
    /// The sandbox that made it, if the thing says so.
    sandbox: Option<&'a SandboxId>,
}

const fn server(verdict: &Verdict) -> &'static str {
    if verdict.server { "running" } else { "stopped" }
}

fn sandbox(object: &Object) -> Option<&SandboxId> {
    match &object.claim {
        Claim::Sandbox(id) => Some(id),
        Claim::Slot(_) | Claim::Instance | Claim::Nobody => None,
    }
}

pub(super) fn json(verdict: &Verdict, instance: &InstanceId, out: &mut dyn Write) -> anyhow::Result<()> {
    let left_over = verdict
        .left_over
        .iter()
        .map(|object| LeftOver { kind: object.kind, name: &object.name, sandbox: sandbox(object) })
        .collect();
    let document = Document {
        instance,
        clean: verdict.clean(),
        server: server(verdict),
        sandboxes: verdict.sandboxes,
        counts: &verdict.counts,
        left_over,
        missing: &verdict.missing,
        unreadable: &verdict.unreadable,
    };
    serde_json::to_writer(&mut *out, &document)?;
    Ok(out.write_all(b"\n")?)
}

pub(super) fn text(verdict: &Verdict, instance: &InstanceId, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "instance {instance}, server {}, {} sandboxes", server(verdict), verdict.sandboxes)?;
    if !verdict.counts.is_empty() {
        let mut table = Table::new();
        table.load_style(NOTHING).set_header(["", "owned", "spare", "left over"]);
        for (kind, count) in &verdict.counts {
            let numbers = [count.owned, count.spare, count.left_over].map(|number| number.to_string());
            table.add_row([kind.name(), &numbers[0], &numbers[1], &numbers[2]]);
        }
        writeln!(out, "{}", table.trim_fmt())?;
    }
    for object in &verdict.left_over {
        let of = sandbox(object).map(|id| format!(" of sandbox {id}")).unwrap_or_default();
        writeln!(out, "left over: {} {}{of}", object.kind.name(), object.name)?;
    }
    for Missing { sandbox, kind } in &verdict.missing {
        writeln!(out, "missing: running sandbox {sandbox} has no {}", kind.name())?;
    }
    for what in &verdict.unreadable {
        writeln!(out, "unreadable: {what}")?;
    }
    writeln!(out, "{}", if verdict.clean() { "nothing is left over" } else { "not clean" })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict() -> Verdict {
        let id: SandboxId = "aaaaaaaaaaaaaaaaaaaa".parse().unwrap();
        let object =
            Object { kind: Kind::LoopDevice, name: "/dev/loop7".into(), claim: Claim::Sandbox(id.clone()) };
        Verdict {
            server: true,
            sandboxes: 1,
            counts: BTreeMap::from([(Kind::LoopDevice, Count { owned: 2, spare: 0, left_over: 1 })]),
            left_over: vec![object],
            missing: vec![Missing { sandbox: id, kind: Kind::Cgroup }],
            unreadable: vec![],
        }
    }

    #[test]
    fn the_json_form_is_stable() {
        let mut out = Vec::new();
        json(&verdict(), &"inst0001".parse().unwrap(), &mut out).unwrap();
        let expected = concat!(
            r#"{"instance":"inst0001","clean":false,"server":"running","sandboxes":1,"#,
            r#""counts":{"loop_device":{"owned":2,"spare":0,"left_over":1}},"#,
            r#""left_over":[{"kind":"loop_device","name":"/dev/loop7","sandbox":"aaaaaaaaaaaaaaaaaaaa"}],"#,
            r#""missing":[{"sandbox":"aaaaaaaaaaaaaaaaaaaa","kind":"cgroup"}],"unreadable":[]}"#,
            "\n"
        );
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn people_read_what_is_wrong() {
        let mut out = Vec::new();
        text(&verdict(), &"inst0001".parse().unwrap(), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("left over: loop device /dev/loop7 of sandbox aaaaaaaaaaaaaaaaaaaa"), "{text}");
        assert!(
            text.contains("missing: running sandbox aaaaaaaaaaaaaaaaaaaa has no control group"),
            "{text}"
        );
        assert!(text.ends_with("not clean\n"), "{text}");
    }
}
