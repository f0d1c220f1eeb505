//! Which cluster a command is for. Contexts are kept as kubectl keeps them: names of clusters in a file, one of
//! them the current one. A flag beats the environment, the environment the file, the file the default.
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use base::{Code, Failure};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    error::CliError,
    resource::{Format, Kind, Listing, column},
    secure::Proof,
    text::Console,
};

/// Where `omni up` listens unless told otherwise.
pub(crate) const DEFAULT_ENDPOINT: &str = "http://127.0.0.1:7600";
/// Names the file of contexts.
const FILE_VARIABLE: &str = "OMNICTL_CONFIG";
/// Names the router.
const ENDPOINT_VARIABLE: &str = "OMNI_ENDPOINT";
/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Options of every command that say which cluster is meant.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ClusterArgs {
    /// Address of the router. Default: $OMNI_ENDPOINT, the current context, or http://127.0.0.1:7600.
    #[arg(long, global = true, value_name = "URL", conflicts_with = "context")]
    endpoint: Option<String>,
    /// A context of `omnictl config`.
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// List the contexts.
    GetContexts {
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Print the name of the current context.
    CurrentContext,
    /// Make a context the current one.
    UseContext {
        /// Its name.
        name: String,
    },
    /// Add a context, or change it. The files of --tls-ca, --tls-cert, --tls-key and --api-key-file go with it: commands that are
    /// for this context use them unless they are told otherwise.
    SetContext {
        /// Its name.
        name: String,
        /// Address of its router.
        #[arg(long = "url", value_name = "URL")]
        url: String,
    },
    /// Remove a context.
    DeleteContext {
        /// Its name.
        name: String,
    },
    /// Print the file of contexts.
    View,
}

/// The file of contexts.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Book {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(default)]
    contexts: BTreeMap<String, Cluster>,
}

/// One cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cluster {
    /// Address of its router.
    pub(crate) endpoint: String,
    /// How to prove who one is there.
    #[serde(default, skip_serializing_if = "Proof::is_empty")]
    pub(crate) proof: Proof,
}

impl Cluster {
    /// Only an address.
    fn at(endpoint: &str) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            proof: Proof::default(),
        }
    }

    /// The address must be one of a server that speaks as the files say.
    fn check(&self) -> Result<(), Failure> {
        self.proof.check()?;
        proto::channel::of_kind(&self.endpoint, "url", self.proof.tls_ca.is_some()).map(drop)
    }
}

static CONTEXTS: Kind = Kind {
    plural: "contexts",
    singular: "context",
    id: "name",
    columns: &[
        column("CURRENT", "current").shown(|mark| mark.as_str().unwrap_or_default().to_owned()),
        column("NAME", "name"),
        column("ENDPOINT", "endpoint"),
        column("CA", "tls_ca").wide(),
        column("CERTIFICATE", "tls_cert").wide(),
        column("KEY-FILE", "api_key_file").wide(),
    ],
};

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Where the file is; `None` where there is no home either.
fn path() -> Option<PathBuf> {
    if let Some(path) = variable(FILE_VARIABLE) {
        return Some(path.into());
    }
    let folder = variable("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".config")))?;
    Some(folder.join("omni").join("omnictl.toml"))
}

impl ClusterArgs {
    /// The cluster that a command is for. One that is named by its address alone brings no files.
    pub(crate) fn resolve(&self) -> Result<Cluster, CliError> {
        if let Some(endpoint) = &self.endpoint {
            return Ok(Cluster::at(endpoint));
        }
        if self.context.is_none()
            && let Some(endpoint) = variable(ENDPOINT_VARIABLE)
        {
            return Ok(Cluster::at(&endpoint));
        }
        let book = path().map_or_else(|| Ok(Book::default()), |path| Book::read(&path))?;
        match self.context.as_ref().or(book.current.as_ref()) {
            Some(name) => Ok(book.find(name)?.clone()),
            None => Ok(Cluster::at(DEFAULT_ENDPOINT)),
        }
    }
}

impl Book {
    /// A file that is not there has no contexts.
    fn read(path: &Path) -> Result<Self, Failure> {
        let refused =
            |why: String| Failure::invalid("config", format!("{}: {why}", path.display()));
        let text = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Ok(about) if about.len() > MAX_FILE => {
                return Err(refused(format!("has more than {MAX_FILE} bytes")));
            }
            _ => fs::read_to_string(path).map_err(|error| refused(error.to_string()))?,
        };
        toml::from_str(&text).map_err(|error| refused(error.message().to_owned()))
    }

    fn write(&self, path: &Path) -> Result<(), CliError> {
        let refused = |source: io::Error| CliError::Output {
            path: path.to_owned(),
            reason: source.to_string(),
        };
        let text = toml::to_string(self).map_err(|error| refused(io::Error::other(error)))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(refused)?;
        // Beside it first: a file that is read at the same moment is whole.
        let part = path.with_extension("toml.part");
        let written = fs::File::create(&part).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        written
            .and_then(|()| fs::rename(&part, path))
            .map_err(refused)
    }

    fn find(&self, name: &str) -> Result<&Cluster, Failure> {
        self.contexts.get(name).ok_or_else(|| {
            let known: Vec<_> = self.contexts.keys().map(String::as_str).collect();
            let known = if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            };
            let message = format!("there is no context {name:?}; there is {known}");
            Failure::new(Code::InvalidArgument, message).with_field("context")
        })
    }

    fn listing(&self) -> Listing {
        let item = |(name, cluster): (&String, &Cluster)| {
            let current = self.current.as_ref() == Some(name);
            json!({
                "current": if current { "*" } else { "" }, "name": name, "endpoint": cluster.endpoint,
                "tls_ca": cluster.proof.tls_ca, "tls_cert": cluster.proof.tls_cert,
                "api_key_file": cluster.proof.api_key_file,
            })
        };
        Listing {
            kind: &CONTEXTS,
            about: vec![],
            items: self.contexts.iter().map(item).collect(),
        }
    }
}

/// `omnictl config`.
pub(crate) fn run(command: ConfigCommand, proof: Proof, console: &Console) -> Result<(), CliError> {
    let Some(path) = path() else {
        let message = format!("there is no home directory: set {FILE_VARIABLE}");
        return Err(Failure::invalid("config", message).into());
    };
    let mut book = Book::read(&path)?;
    match command {
        ConfigCommand::GetContexts { output } => book.listing().print(output, console),
        ConfigCommand::CurrentContext => match &book.current {
            Some(name) => console.line(name),
            None => Err(Failure::new(Code::NotFound, "no context is the current one").into()),
        },
        ConfigCommand::UseContext { name } => {
            book.find(&name)?;
            book.current = Some(name.clone());
            book.write(&path)?;
            console.talk(&format!("commands are for {name} from now on"))
        }
        ConfigCommand::SetContext { name, url } => {
            let cluster = Cluster {
                endpoint: url,
                proof: proof.absolute()?,
            };
            cluster.check()?;
            // The first one is the one that is meant.
            book.current.get_or_insert_with(|| name.clone());
            book.contexts.insert(name.clone(), cluster);
            book.write(&path)?;
            console.talk(&format!("context {name} is set"))
        }
        ConfigCommand::DeleteContext { name } => {
            book.find(&name)?;
            book.contexts.remove(&name);
            book.current = book.current.filter(|current| *current != name);
            book.write(&path)?;
            console.talk(&format!("context {name} is removed"))
        }
        ConfigCommand::View => {
            let text = toml::to_string(&book).map_err(|error| CliError::Io {
                what: "write the contexts",
                source: io::Error::other(error),
            })?;
            console.raw(text.as_bytes())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_book_reads_back_and_an_unknown_key_is_refused() {
        let mut book = Book {
            current: Some("a".to_owned()),
            ..Book::default()
        };
        book.contexts
            .insert("a".to_owned(), Cluster::at("http://h:1"));
        let proof = Proof {
            tls_ca: Some("/ca.pem".into()),
            ..Proof::default()
        };
        let endpoint = "https://h:1".to_owned();
        book.contexts
            .insert("b".to_owned(), Cluster { endpoint, proof });
        let text = toml::to_string(&book).unwrap();
        assert_eq!(toml::from_str::<Book>(&text).unwrap(), book);
        assert!(toml::from_str::<Book>("colour = \"red\"").is_err());
        let unknown =
            "[contexts.a]\nendpoint = \"http://h:1\"\n[contexts.a.proof]\ntls_cat = \"x\"";
        assert!(toml::from_str::<Book>(unknown).is_err());
        assert!(
            book.find("c")
                .unwrap_err()
                .message
                .contains("there is a, b")
        );
    }
}
