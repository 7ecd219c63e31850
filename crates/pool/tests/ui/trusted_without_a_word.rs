use netmem_pool::{PeerShared, Region, RegionError, RegionOptions, TrustedPeer};

fn from_the_system() -> Result<Region<TrustedPeer>, RegionError> {
    RegionOptions::new(8).build()
}

fn from_a_safe_function(region: Region<PeerShared>) -> Region<TrustedPeer> {
    region.trust_peer()
}

fn main() {}
