//! The attribute of `doorbell-test`, which documents it.

#![forbid(unsafe_code)]

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, Ident, ItemFn, Result, Token};

/// A test on userspace devices; see the crate `doorbell-test`.
#[proc_macro_attribute]
pub fn test(options: proc_macro::TokenStream, function: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(options.into(), function.into())
        .unwrap_or_else(Error::into_compile_error)
        .into()
}

/// `name = value`.
struct Setting {
    name: Ident,
    value: Expr,
}

impl Parse for Setting {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let name = input.parse()?;
        input.parse::<Token![=]>()?;
        let value = input.parse()?;
        Ok(Self { name, value })
    }
}

fn expand(options: TokenStream, function: TokenStream) -> Result<TokenStream> {
    let settings = Punctuated::<Setting, Token![,]>::parse_terminated.parse2(options)?;
    let mut function: ItemFn = syn::parse2(function)?;
    if let Some(token) = function.sig.asyncness {
        return Err(Error::new(
            token.span,
            "a test on devices is no async fn: block on the future in it",
        ));
    }
    if !function.sig.generics.params.is_empty() {
        let text = "a test on devices has no generic parameters: each argument is a Context";
        return Err(Error::new_spanned(&function.sig.generics, text));
    }
    let attributes = std::mem::take(&mut function.attrs);
    let panics = attributes
        .iter()
        .any(|attribute| attribute.path().is_ident("should_panic"));
    let expectation = panics.then(|| quote! { .expect_panic() });
    let settings = settings.iter().map(|Setting { name, value }| {
        if name == "pcap" {
            return quote! { .pcap(#value) };
        }
        let name = name.to_string();
        quote! { .option(#name, #value) }
    });
    let (name, output) = (&function.sig.ident, &function.sig.output);
    let devices: Vec<_> = (0..function.sig.inputs.len())
        .map(|number| format_ident!("device_{number}", span = Span::mixed_site()))
        .collect();
    Ok(quote! {
        #(#attributes)*
        #[::core::prelude::v1::test]
        fn #name() #output {
            #function
            ::doorbell_test::Devices::new()
                .name(::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)))
                #(#settings)*
                #expectation
                .run(|[#(#devices),*]| #name(#(#devices),*))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{TokenStream, expand};

    #[test]
    fn what_is_no_test_on_devices_is_an_error_of_one_line() {
        let error = |options: &str, function: &str| {
            let parse = |text: &str| text.parse::<TokenStream>().unwrap();
            expand(parse(options), parse(function)).unwrap_err().to_string()
        };
        let function = "fn ends(a: Context) {}";
        assert!(error("drop", function).ends_with("expected `=`"));
        assert_eq!(
            error("", "async fn ends(a: Context) {}"),
            "a test on devices is no async fn: block on the future in it"
        );
        assert!(error("", "fn ends<T>(a: T) {}").starts_with("a test on devices has no generic parameters"));
        assert!(error("", "struct Ends;").starts_with("expected `fn`"));
    }
}
