use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::*;

fn parsed(text: &str) -> Result<Failpoints, ParseError> {
    text.parse()
}

#[test]
fn what_is_not_understood_is_refused() {
    for text in ["", ";", "engine.create.disk", "=hang", "engine.create.disk=", "engine.create.disk=error;"] {
        assert!(parsed(text).is_err(), "{text:?}");
    }
    for passes in ["0", "-1", "x", "", "4294967295", "4294967296"] {
        let text = format!("engine.create.disk=error*{passes}");
        assert!(matches!(parsed(&text), Err(ParseError::Form(_))), "{text}");
    }
    assert!(matches!(parsed("no.such=hang"), Err(ParseError::Name(name)) if name == "no.such"));
    assert!(matches!(parsed("engine.create.disk=explode"), Err(ParseError::Action(_))));
    let twice = parsed("engine.create.disk=hang;engine.create.disk=error");
    assert_eq!(twice.unwrap_err(), ParseError::Twice("engine.create.disk"));
}

#[test]
fn every_name_can_be_armed_and_is_said_again() {
    let all: Vec<_> = NAMES.iter().map(|name| format!("{name}=hang")).collect();
    let text = all.join(";");
    assert_eq!(parsed(&text).unwrap().to_string(), text);
    assert_eq!(NAMES.iter().collect::<BTreeSet<_>>().len(), NAMES.len(), "a name twice");
}

#[test]
fn a_count_is_for_the_first_passes() {
    let points = parsed("engine.create.disk=error*2;engine.create.files=error").unwrap();
    let acts: Vec<_> = (0..4).map(|_| points.at("engine.create.disk").is_some()).collect();
    assert_eq!(acts, [true, true, false, false]);
    assert!((0..4).all(|_| points.at("engine.create.files").is_some()));
    assert!(points.at("engine.create.group").is_none());
}

/// One test, because what is armed is armed for the whole process.
#[test]
fn off_until_armed_and_then_as_told() {
    assert_eq!(hit("engine.create.disk"), Ok(()));
    let text = "engine.create.disk=error*1;engine.create.files=panic;engine.create.group=hang";
    assert!(parsed(text).unwrap().arm());
    assert!(!parsed("engine.create.made=error").unwrap().arm(), "only once");
    assert_eq!(hit("engine.create.made"), Ok(()));
    assert_eq!(hit("engine.create.disk"), Err(Injected("engine.create.disk")));
    assert_eq!(hit("engine.create.disk"), Ok(()));
    assert!(std::panic::catch_unwind(|| hit("engine.create.files")).is_err());
    let mut hanging = pin!(hit_async("engine.create.group"));
    for _ in 0..3 {
        assert_eq!(hanging.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending);
    }
}
