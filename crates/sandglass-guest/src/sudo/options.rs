//! The command line of `sudo`: what scripts use of it.

use super::{Action, Preserve};

/// What the caller wants.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Run something.
    Run(Box<Options>),
    /// Say what would be allowed.
    List,
    /// Print the version.
    Version,
    /// Print how it is used, because that was asked for.
    Help,
    /// Say how it is used, because nothing was asked for.
    Usage,
    /// Forget a password that nobody asked for.
    Nothing,
}

/// What to run and how.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) action: Action,
    pub(super) user: String,
    pub(super) group: Option<String>,
    pub(super) preserve: Preserve,
    pub(super) assignments: Vec<(String, String)>,
    pub(super) set_home: bool,
    pub(super) background: bool,
    pub(super) chdir: Option<String>,
}

/// Options with a value, by their short and long names.
const WITH_VALUE: [(char, &str); 8] = [
    ('u', "user"),
    ('g', "group"),
    ('D', "chdir"),
    ('p', "prompt"),
    ('C', "close-from"),
    ('h', "host"),
    ('T', "command-timeout"),
    ('r', "role"),
];

/// Options without one.
const PLAIN: [(char, &str); 15] = [
    ('n', "non-interactive"),
    ('S', "stdin"),
    ('A', "askpass"),
    ('B', "bell"),
    ('P', "preserve-groups"),
    ('N', "no-update"),
    ('H', "set-home"),
    ('E', "preserve-env"),
    ('i', "login"),
    ('s', "shell"),
    ('b', "background"),
    ('k', "reset-timestamp"),
    ('K', "remove-timestamp"),
    ('v', "validate"),
    ('l', "list"),
];

#[derive(Debug)]
struct Parser {
    options: Options,
    login: bool,
    shell: bool,
    validate: bool,
    list: bool,
    forget: bool,
}

impl Parser {
    fn plain(&mut self, option: char) -> Result<(), String> {
        match option {
            // There is no password to ask for, and groups are always the target's.
            'n' | 'S' | 'A' | 'B' | 'P' | 'N' => {}
            'H' => self.options.set_home = true,
            'E' => self.options.preserve = Preserve::All,
            'i' => self.login = true,
            's' => self.shell = true,
            'b' => self.options.background = true,
            'k' | 'K' => self.forget = true,
            'v' => self.validate = true,
            'l' => self.list = true,
            _ => return Err(format!("invalid option -- '{option}'")),
        }
        Ok(())
    }

    fn valued(&mut self, option: char, value: String) -> Result<(), String> {
        match option {
            'u' if value.is_empty() => return Err("the user name is empty".into()),
            'u' => self.options.user = value,
            'g' => self.options.group = Some(value),
            'D' => self.options.chdir = Some(value),
            'p' | 'C' => {}
            _ => return Err(format!("option -{option} is not supported here")),
        }
        Ok(())
    }

    fn long(&mut self, text: &str, rest: &mut impl Iterator<Item = String>) -> Result<(), String> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        if let ("preserve-env", Some(names)) = (name, value) {
            let names = names.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
            self.options.preserve = Preserve::Named(names);
            return Ok(());
        }
        if let Some((short, _)) = WITH_VALUE.iter().find(|(_, long)| *long == name) {
            let value = value.map(Into::into).or_else(|| rest.next());
            return self
                .valued(*short, value.ok_or_else(|| format!("option '--{name}' requires an argument"))?);
        }
        match PLAIN.iter().find(|(_, long)| *long == name) {
            Some((short, _)) if value.is_none() => self.plain(*short),
            _ => Err(format!("unrecognized option '--{text}'")),
        }
    }

    fn short(&mut self, cluster: &str, rest: &mut impl Iterator<Item = String>) -> Result<(), String> {
        let mut letters = cluster.chars();
        while let Some(letter) = letters.next() {
            if !WITH_VALUE.iter().any(|(short, _)| *short == letter) {
                self.plain(letter)?;
                continue;
            }
            let attached = letters.as_str();
            let value = if attached.is_empty() { rest.next() } else { Some(attached.into()) };
            return self
                .valued(letter, value.ok_or_else(|| format!("option requires an argument -- '{letter}'"))?);
        }
        Ok(())
    }
}

/// `NAME=value`, if the text is an assignment.
fn assignment(text: &str) -> Option<(String, String)> {
    let (name, value) = text.split_once('=')?;
    let is_name = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    is_name.then(|| (name.into(), value.into()))
}

/// Reads the arguments, the program's own name not included.
///
/// # Errors
/// In the words of `sudo`.
pub(super) fn parse(args: impl IntoIterator<Item = String>) -> Result<Wanted, String> {
    let mut args = args.into_iter();
    let mut parser = Parser {
        options: Options {
            action: Action::Validate,
            user: "root".into(),
            group: None,
            preserve: Preserve::Usual,
            assignments: Vec::new(),
            set_home: false,
            background: false,
            chdir: None,
        },
        login: false,
        shell: false,
        validate: false,
        list: false,
        forget: false,
    };
    let mut command = Vec::new();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--" => {
                command.extend(args.by_ref());
            }
            "-V" | "--version" => return Ok(Wanted::Version),
            "--help" => return Ok(Wanted::Help),
            "-e" | "--edit" => return Err("editing files is not supported here".into()),
            _ => {
                if let Some(long) = arg.strip_prefix("--") {
                    parser.long(long, &mut args)?;
                } else if let Some(cluster) = arg.strip_prefix('-').filter(|cluster| !cluster.is_empty()) {
                    // Real ones take a host as well; nobody has another host here.
                    if cluster == "h" {
                        return Ok(Wanted::Help);
                    }
                    parser.short(cluster, &mut args)?;
                } else if let Some(assignment) = assignment(&arg) {
                    parser.options.assignments.push(assignment);
                } else {
                    command.push(arg);
                    command.extend(args.by_ref());
                }
            }
        }
    }
    // After `--` assignments may still come first.
    while let Some(assignment) = command.first().and_then(|first| assignment(first)) {
        parser.options.assignments.push(assignment);
        command.remove(0);
    }
    if parser.login && parser.shell {
        return Err("you may not specify both the -i and -s options".into());
    }
    if parser.list {
        return Ok(Wanted::List);
    }
    let mut options = parser.options;
    options.action = if parser.login || parser.shell {
        Action::Shell { login: parser.login, command }
    } else if !command.is_empty() {
        Action::Command(command)
    } else if parser.validate {
        Action::Validate
    } else if parser.forget {
        return Ok(Wanted::Nothing);
    } else {
        return Ok(Wanted::Usage);
    };
    Ok(Wanted::Run(Box::new(options)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Options {
        match parse(line.split(' ').map(Into::into)) {
            Ok(Wanted::Run(options)) => *options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn what_scripts_write() {
        let command = |words: &[&str]| Action::Command(words.iter().map(|word| (*word).into()).collect());
        assert_eq!(run("apt-get -y install x").action, command(&["apt-get", "-y", "install", "x"]));
        let options = run("-nHu bob -- ls -l");
        assert_eq!((options.user.as_str(), options.set_home), ("bob", true));
        assert_eq!(options.action, command(&["ls", "-l"]));
        assert_eq!(run("-ubob id").user, "bob");
        assert_eq!(run("--user=bob id").user, "bob");
        assert_eq!(run("--user bob id").user, "bob");
        assert_eq!(run("-u #1000 -g #5 id").group.as_deref(), Some("#5"));
        let options = run("A=1 -E B=x=y env");
        assert_eq!(options.preserve, Preserve::All);
        assert_eq!(options.assignments, [("A".into(), "1".into()), ("B".into(), "x=y".into())]);
        assert_eq!(run("--preserve-env=A,B env").preserve, Preserve::Named(vec!["A".into(), "B".into()]));
        assert_eq!(run("-i").action, Action::Shell { login: true, command: vec![] });
        assert_eq!(run("-s id").action, Action::Shell { login: false, command: vec!["id".into()] });
        assert_eq!(run("-v").action, Action::Validate);
        assert_eq!(run("-D /tmp pwd").chdir.as_deref(), Some("/tmp"));
        assert_eq!(run("-k true").action, command(&["true"]));
        assert_eq!(run("./a=b x").action, command(&["./a=b", "x"]));
    }

    #[test]
    fn the_rest() {
        let parse = |line: &str| parse(line.split_whitespace().map(Into::into));
        assert_eq!(parse(""), Ok(Wanted::Usage));
        assert_eq!(parse("-h"), Ok(Wanted::Help));
        assert_eq!(parse("-k"), Ok(Wanted::Nothing));
        assert_eq!(parse("-nl"), Ok(Wanted::List));
        assert_eq!(parse("-V"), Ok(Wanted::Version));
        for wrong in ["-x id", "-u", "--user", "--nonsense", "-e f", "-i -s", "--host=a id", "--list=x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
