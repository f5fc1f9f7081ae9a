// Shows the document of this gateway. A key that is typed stays in the memory of the page.
"use strict";
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  docExpansion: "list",
  filter: true,
  tryItOutEnabled: true,
  validatorUrl: null,
});
