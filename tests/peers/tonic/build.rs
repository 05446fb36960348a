//! The service and its client, as tonic generates them from a .proto file, without protoc.

use tonic_build::manual::{Builder, Method, MethodBuilder, Service};

fn method(name: &str, route: &str, input: &str, output: &str) -> MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(input)
        .output_type(output)
        .codec_path("tonic_prost::ProstCodec")
}

fn main() {
    let store = Service::builder()
        .package("doorbell")
        .name("Store")
        .method(method("put", "Put", "crate::Entry", "crate::Stored").build())
        .method(method("get", "Get", "crate::Key", "crate::Entry").build())
        .method(
            method("list", "List", "crate::Key", "crate::Entry")
                .server_streaming()
                .build(),
        )
        .build();
    Builder::new().compile(&[store]);
}
