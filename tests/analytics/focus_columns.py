"""FOCUS 1.3's columns (Cost and Usage) as the specification has them: type, whether null is allowed, allowed values.

Of release 1.2 from the specification's files at its tag v1.2, of 1.3 its eight new ones. `MANDATORY`: those of level
Mandatory. A JSON column is a string in files.
"""

CHARGE_CATEGORIES = {"Usage", "Purchase", "Tax", "Credit", "Adjustment"}
NULL, NOT_NULL = True, False
MANDATORY: dict[str, tuple[str, bool, set[str] | None]] = {
    "BilledCost": ("Decimal", NOT_NULL, None),
    "BillingAccountId": ("String", NOT_NULL, None),
    "BillingAccountName": ("String", NULL, None),
    "BillingCurrency": ("String", NOT_NULL, None),
    "BillingPeriodEnd": ("Date/Time", NOT_NULL, None),
    "BillingPeriodStart": ("Date/Time", NOT_NULL, None),
    "ChargeCategory": ("String", NOT_NULL, CHARGE_CATEGORIES),
    "ChargeClass": ("String", NULL, {"Correction"}),
    "ChargeDescription": ("String", NULL, None),
    "ChargePeriodEnd": ("Date/Time", NOT_NULL, None),
    "ChargePeriodStart": ("Date/Time", NOT_NULL, None),
    "ContractedCost": ("Decimal", NOT_NULL, None),
    "EffectiveCost": ("Decimal", NOT_NULL, None),
    "HostProviderName": ("String", NOT_NULL, None),  # 1.3
    "InvoiceIssuerName": ("String", NOT_NULL, None),
    "ListCost": ("Decimal", NOT_NULL, None),
    "PricingQuantity": ("Decimal", NULL, None),
    "PricingUnit": ("String", NULL, None),
    "ProviderName": ("String", NOT_NULL, None),  # deprecated in 1.3
    "PublisherName": ("String", NOT_NULL, None),  # deprecated in 1.3
    "ServiceCategory": ("String", NOT_NULL, {"Integration", "Networking", "Other"}),
    "ServiceName": ("String", NOT_NULL, None),
    "ServiceProviderName": ("String", NOT_NULL, None),  # 1.3
}
OTHERS: dict[str, tuple[str, bool, set[str] | None]] = {
    "AllocatedMethodDetails": ("JSON", NULL, None),  # 1.3
    "AllocatedMethodId": ("String", NULL, None),  # 1.3
    "AllocatedResourceId": ("String", NULL, None),  # 1.3
    "AllocatedResourceName": ("String", NULL, None),  # 1.3
    "AllocatedTags": ("JSON", NULL, None),  # 1.3
    "AvailabilityZone": ("String", NULL, None),
    "BillingAccountType": ("String", NOT_NULL, None),
    "ChargeFrequency": ("String", NOT_NULL, {"One-Time", "Recurring", "Usage-Based"}),
    "ConsumedQuantity": ("Decimal", NULL, None),
    "ConsumedUnit": ("String", NULL, None),
    "ContractApplied": ("JSON", NULL, None),  # 1.3
    "ContractedUnitPrice": ("Decimal", NULL, None),
    "InvoiceId": ("String", NULL, None),
    "ListUnitPrice": ("Decimal", NULL, None),
    "PricingCategory": ("String", NULL, {"Standard", "Dynamic", "Committed", "Other"}),
    "RegionId": ("String", NULL, None),
    "ResourceId": ("String", NULL, None),
    "ResourceName": ("String", NULL, None),
    "ResourceType": ("String", NULL, None),
    "ServiceSubcategory": ("String", NOT_NULL, {"API Management", "Messaging", "Workflow Orchestration"}),
    "SkuId": ("String", NULL, None),
    "SkuMeter": ("String", NULL, None),
    "SkuPriceDetails": ("JSON", NULL, None),
    "SkuPriceId": ("String", NULL, None),
    "SubAccountId": ("String", NULL, None),
    "SubAccountName": ("String", NULL, None),
    "SubAccountType": ("String", NULL, None),
    "Tags": ("JSON", NULL, None),
}
