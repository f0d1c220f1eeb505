//! Where settings come from: flag, then environment, then file, then default. Everything is parsed
//! and checked here, before a port opens; an error is one sentence that names the setting.
mod common;
mod file;
mod table;

use std::{collections::BTreeMap, fmt, net::SocketAddr, str::FromStr, time::Duration};

use clap::{Arg, ArgMatches, Command, parser::ValueSource};

use crate::error::OmniError;

pub(crate) use file::ConfigFile;
pub(crate) use table::Role;
use table::{Fallback, Setting};

/// Where a value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Flag,
    Environment,
    File,
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "flag",
            Self::Environment => "environment",
            Self::File => "file",
            Self::Default => "default",
        })
    }
}

/// Every setting of one role, resolved but still text.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    role: Role,
    values: BTreeMap<&'static str, (String, Source)>,
}

/// The subcommand of a role, with one flag for each of its settings.
pub(crate) fn command(role: Role) -> Command {
    let command = Command::new(role.name()).about(role.about());
    role.settings()
        .fold(command, |command, setting| command.arg(argument(setting)))
}

fn argument(setting: &Setting) -> Arg {
    let help = match setting.fallback {
        Fallback::Value(value) => format!("{} [default: {value}]", setting.help),
        Fallback::Required => format!("{} [required]", setting.help),
        Fallback::Unset => setting.help.to_owned(),
    };
    Arg::new(setting.key)
        .long(setting.flag())
        .env(setting.variable())
        .hide_env_values(true)
        .value_name(setting.value_name)
        .help(help)
}

impl Settings {
    /// Merges the sources. Nothing is parsed yet but every required setting is there.
    pub(crate) fn resolve(
        role: Role,
        matches: &ArgMatches,
        file: &ConfigFile,
    ) -> Result<Self, OmniError> {
        let section = file.section(role)?;
        let mut values = BTreeMap::new();
        for setting in role.settings() {
            let given = matches.get_one::<String>(setting.key).cloned();
            let source = matches.value_source(setting.key);
            let found = match (given, source) {
                (Some(value), Some(ValueSource::EnvVariable)) => Some((value, Source::Environment)),
                (Some(value), _) => Some((value, Source::Flag)),
                (None, _) => section
                    .get(setting.key)
                    .map(|value| (value.clone(), Source::File)),
            };
            match (found, setting.fallback) {
                (Some(found), _) => {
                    values.insert(setting.key, found);
                }
                (None, Fallback::Value(value)) => {
                    values.insert(setting.key, (value.to_owned(), Source::Default));
                }
                (None, Fallback::Unset) => {}
                (None, Fallback::Required) => {
                    return Err(OmniError::Config(format!(
                        "{} is required: give --{}, {} or `{}` in [{}] of the config file",
                        setting.key,
                        setting.flag(),
                        setting.variable(),
                        setting.key,
                        role.section(),
                    )));
                }
            }
        }
        Ok(Self { role, values })
    }

    pub(crate) fn get(&self, key: &'static str) -> Option<&str> {
        self.values.get(key).map(|(value, _)| value.as_str())
    }

    /// The text of a setting that always has one.
    pub(crate) fn text(&self, key: &'static str) -> Result<&str, OmniError> {
        self.get(key)
            .filter(|value| !value.is_empty())
            .ok_or_else(|| OmniError::Config(format!("{key} must not be empty")))
    }

    fn parsed<T: FromStr>(&self, key: &'static str, what: &str) -> Result<T, OmniError> {
        let text = self.text(key)?;
        text.parse()
            .map_err(|_| OmniError::Config(format!("{key} must be {what}, got {text:?}")))
    }

    /// An address to listen on.
    pub(crate) fn socket(&self, key: &'static str) -> Result<SocketAddr, OmniError> {
        self.parsed(key, "IP:PORT")
    }

    /// A whole number of at least `least`.
    pub(crate) fn count(&self, key: &'static str, least: usize) -> Result<usize, OmniError> {
        let value = self.parsed(key, "a whole number")?;
        if value < least {
            return Err(OmniError::Config(format!(
                "{key} must be at least {least}, got {value}"
            )));
        }
        Ok(value)
    }

    /// A wait of 1 second to 1 day.
    pub(crate) fn seconds(&self, key: &'static str) -> Result<Duration, OmniError> {
        let seconds: u64 = self.parsed(key, "a whole number of seconds")?;
        if !(1..=86_400).contains(&seconds) {
            return Err(OmniError::Config(format!(
                "{key} must be 1 to 86400 seconds, got {seconds}"
            )));
        }
        Ok(Duration::from_secs(seconds))
    }

    /// One of a few words.
    pub(crate) fn one_of<T: Copy>(
        &self,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Result<T, OmniError> {
        let text = self.text(key)?;
        words
            .iter()
            .find(|(word, _)| *word == text)
            .map(|&(_, value)| value)
            .ok_or_else(|| {
                let legal: Vec<&str> = words.iter().map(|&(word, _)| word).collect();
                OmniError::Config(format!(
                    "{key} must be one of {}, got {text:?}",
                    legal.join(", ")
                ))
            })
    }

    /// Bytes, with an optional KiB, MiB or GiB.
    pub(crate) fn bytes(&self, key: &'static str) -> Result<usize, OmniError> {
        let text = self.text(key)?;
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[digits.len()..] {
            "" | "B" => Some(1_usize),
            "KiB" => Some(1 << 10),
            "MiB" => Some(1 << 20),
            "GiB" => Some(1 << 30),
            _ => None,
        };
        digits
            .parse::<usize>()
            .ok()
            .zip(unit)
            .and_then(|(count, unit)| count.checked_mul(unit))
            .filter(|&bytes| bytes > 0)
            .ok_or_else(|| {
                OmniError::Config(format!(
                    "{key} must be a number of bytes such as 256MiB, got {text:?}"
                ))
            })
    }

    /// TLS is on: addresses begin with `https://`.
    pub(crate) fn secure(&self) -> bool {
        self.get("tls_cert").is_some()
    }

    /// Address of another process.
    pub(crate) fn url(&self, key: &'static str) -> Result<String, OmniError> {
        let text = self.text(key)?;
        proto::channel::of_kind(text, key, self.secure())
            .map(|_| text.trim_end_matches('/').to_owned())
            .map_err(|failure| OmniError::Config(failure.message))
    }
}

/// As a section of a config file, each line with its source.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "[{}]", self.role.section())?;
        for (key, (value, source)) in &self.values {
            writeln!(
                f,
                "{key} = {} # {source}",
                toml::Value::from(value.as_str())
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(args: &[&str], file: &str) -> Result<Settings, OmniError> {
        let matches = command(Role::DitWorker)
            .try_get_matches_from(std::iter::once("dit-worker").chain(args.iter().copied()))
            .unwrap();
        Settings::resolve(Role::DitWorker, &matches, &ConfigFile::parse(file)?)
    }

    #[test]
    fn flag_beats_file_beats_default() {
        let file = "[dit_worker]\nmodel = \"/m\"\nmax_rows = 3\nmax_tokens = 9\n";
        let settings = resolve(&["--max-rows", "5"], file).unwrap();
        assert_eq!(settings.count("max_rows", 1).unwrap(), 5);
        assert_eq!(settings.count("max_tokens", 1).unwrap(), 9);
        assert_eq!(settings.text("transport").unwrap(), "shm");
        let shown = settings.to_string();
        for line in [
            "max_rows = \"5\" # flag",
            "max_tokens = \"9\" # file",
            "transport = \"shm\" # default",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        ConfigFile::parse(&shown)
            .unwrap()
            .section(Role::DitWorker)
            .unwrap();
    }

    #[test]
    fn every_flag_has_a_variable() {
        for role in Role::ALL {
            for argument in command(role).get_arguments() {
                let variable = argument.get_env().unwrap().to_str().unwrap();
                assert!(variable.starts_with("OMNI_"), "{variable}");
            }
        }
    }

    #[test]
    fn bad_settings_are_one_sentence_that_names_them() {
        let model = ["--model", "/m"];
        for (args, key) in [
            (&["--listen", "nowhere"][..], "listen"),
            (&["--max-rows", "0"], "max_rows"),
            (&["--max-rows", "many"], "max_rows"),
            (&["--registry", "127.0.0.1"], "registry"),
            (&["--transport", "pigeon"], "transport"),
        ] {
            let settings = resolve(&[&model[..], args].concat(), "").unwrap();
            let error = [
                settings.socket("listen").err(),
                settings.count("max_rows", 1).err(),
                settings.url("registry").err(),
                settings
                    .one_of("transport", &[("shm", 0), ("tcp", 1)])
                    .err(),
            ]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
            assert_eq!(error.len(), 1, "{args:?}");
            assert!(error[0].to_string().contains(key), "{error:?}");
            assert_eq!(error[0].exit_code(), 64);
            assert_eq!(error[0].to_string().lines().count(), 1);
        }
        let error = resolve(&[], "").unwrap_err();
        assert!(error.to_string().contains("--model"), "{error}");
    }

    #[test]
    fn bytes_take_binary_units_and_nothing_else() {
        let parse = |text: &str| {
            let mut settings = resolve(&["--model", "/m"], "").unwrap();
            settings
                .values
                .insert("pool_bytes", (text.to_owned(), Source::Flag));
            settings.bytes("pool_bytes").ok()
        };
        assert_eq!(parse("64KiB"), Some(65_536));
        assert_eq!(parse("1GiB"), Some(1 << 30));
        assert_eq!(parse("12"), Some(12));
        for bad in [
            "",
            "0",
            "-1",
            "1GB",
            "MiB",
            "1.5MiB",
            "99999999999999999999",
            "99999999999GiB",
        ] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
