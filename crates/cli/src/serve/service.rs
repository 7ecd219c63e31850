//! What a service is: a protocol that a server speaks on each connection.

use super::client::{Client, End};
use netmem_inet::tcp::Config;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Payload of at least this many bytes is sent from the page in which it was received. Shorter
/// payload is copied, because otherwise it would pin a page that is many times as long.
pub(super) const BY_REFERENCE: usize = 512;

/// A service: a protocol that the server speaks on each connection.
pub(super) trait Service: Sync {
    /// The port on which it listens, unless the user chooses.
    const PORT: u16;
    /// The state of a connection, which another process needs to continue it.
    type State: Default + Serialize + DeserializeOwned + Send;

    /// The settings of its connections.
    fn config() -> Config {
        Config::default()
    }

    /// Serves a connection. `state` is the default for a new connection, or was saved by another
    /// process. Returns when the connection must be closed; or with [`End::Leaves`], after it has
    /// stored the present state in `state`.
    async fn serve(&self, client: &mut Client, state: &mut Self::State) -> Result<(), End>;

    /// The service's own lines of the report at the end.
    fn report(&self) -> String {
        String::new()
    }
}
