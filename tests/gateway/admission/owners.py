"""Whose limits of money a request meets, where no label has a budget."""

from gateway.admission.prices import Owner
from gateway.admission.request import AdmissionRequest


class Owners:
    def owner_of(self, request: AdmissionRequest) -> Owner:
        return (request.tenant_id, request.project_id, request.key_id, None)
