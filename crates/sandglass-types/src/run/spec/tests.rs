use super::*;

fn spec() -> RunSpec {
    RunSpec {
        template: "base".into(),
        outputs: Vec::new(),
        web: Web::Off,
        shell: true,
        agent: Agent::Command(Command::shell("true".into()).unwrap()),
        model: None,
        timeout: Duration::from_secs(60),
        most: Micros(40_000),
        retention: Retention::Full,
        retention_days: 30,
        metadata: BTreeMap::new(),
        checks: vec![Check {
            command: Command::shell("test -e x".into()).unwrap(),
            timeout: Duration::from_secs(9),
        }],
        max_repairs: 2,
    }
}

fn file(path: &str) -> InputFile {
    InputFile { path: path.parse().unwrap(), content: vec![1], mode: FileMode::DEFAULT, read_only: false }
}

#[test]
fn each_field_has_its_bounds() {
    assert_eq!(spec().check(), Ok(()));
    let refused = |change: fn(&mut RunSpec)| {
        let mut spec = spec();
        change(&mut spec);
        spec.check().unwrap_err().field
    };
    assert_eq!(refused(|spec| spec.timeout = Duration::ZERO), "timeout_seconds");
    assert_eq!(refused(|spec| spec.timeout = Duration::from_secs(86_401)), "timeout_seconds");
    assert_eq!(refused(|spec| spec.outputs = vec!["x".parse().unwrap(); 65]), "outputs");
    assert_eq!(refused(|spec| spec.checks = vec![spec.checks[0].clone(); 17]), "checks");
    assert_eq!(refused(|spec| spec.checks[0].timeout = Duration::ZERO), "checks.timeout_seconds");
    assert_eq!(refused(|spec| spec.max_repairs = 11), "max_repairs");
    assert_eq!(refused(|spec| spec.retention_days = 0), "retention_days");
    assert_eq!(refused(|spec| spec.retention_days = 366), "retention_days");
    assert_eq!(refused(|spec| drop(spec.metadata.insert("k".into(), "v".repeat(17 << 10)))), "metadata");
    assert_eq!(refused(|spec| spec.agent = Agent::Builtin), "model");
    let priceless = |spec: &mut RunSpec| (spec.model, spec.most) = ("m".parse().ok(), Micros::ZERO);
    assert_eq!(refused(priceless), "max_cost_micros");
}

#[test]
fn parts_are_checked_where_they_are_parsed() {
    for text in ["", " \n", "a\0b", &"x".repeat(MAX_PROMPT + 1)] {
        assert!(Prompt::try_from(text.to_owned()).is_err());
    }
    assert_eq!(Prompt::try_from("x".repeat(MAX_PROMPT)).unwrap().as_str().len(), MAX_PROMPT);
    assert!("anthropic/claude-opus-5.5:x@y".parse::<ModelName>().is_ok());
    for text in ["", "a b", "a\n", &"x".repeat(129)] {
        assert!(text.parse::<ModelName>().is_err(), "{text:?}");
    }
    assert_eq!(Command::shell("echo hi | cat".into()).unwrap().shown(), "echo hi | cat");
    assert_eq!(Command::words(vec!["ls".into(), "-l".into()]).unwrap().shown(), "ls -l");
    for words in
        [vec![], vec![String::new()], vec!["a\0".into()], vec!["a".into(); 257], vec!["x".repeat(9000)]]
    {
        assert!(Command::words(words).is_err());
    }
    assert!(Command::shell(String::new()).is_err());
    assert!(FileMode::try_from(0o755).is_ok() && FileMode::try_from(0o4755).is_err());
}

#[test]
fn files_are_not_in_each_other_s_way() {
    let turn = |paths: &[&str]| Turn {
        prompt: Prompt::try_from("do".to_owned()).unwrap(),
        files: paths.iter().map(|path| file(path)).collect(),
        hold: false,
    };
    assert_eq!(turn(&["a", "b/a", "b/c", "bc"]).check(), Ok(()));
    assert!(turn(&["a", "a"]).check().unwrap_err().what.contains("twice"));
    assert!(turn(&["a/b", "a"]).check().unwrap_err().what.contains("\"a/b\""));
    let many: Vec<String> = (0..=MAX_FILES).map(|n| n.to_string()).collect();
    assert!(turn(&many.iter().map(String::as_str).collect::<Vec<_>>()).check().is_err());
    assert!(!format!("{:?}", turn(&["a"])).contains("[1]"), "content is in no log");
}

#[test]
fn what_a_client_wrote_is_not_kept_without_its_leave() {
    let marked = || Command::shell("echo marker".into()).unwrap();
    let mut spec = RunSpec { agent: Agent::Command(marked()), ..spec() };
    spec.checks[0].command = marked();
    spec.metadata.insert("marker".into(), "marker".into());
    assert_eq!(spec.kept(), spec);
    for retention in [Retention::Metadata, Retention::None] {
        let kept = RunSpec { retention, ..spec.clone() }.kept();
        assert!(!serde_json::to_string(&kept).unwrap().contains("marker"));
        assert_eq!((kept.checks.len(), kept.timeout), (1, spec.timeout));
    }
}
